"""``python -m bench``: see docs/performance.md."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path

from bench.plan import QUICK, Plan
from bench.report import text, to_json, write_docs
from bench.run import SUBJECTS, Setting, run
from meshnet.artifact.samples import DEFAULT_SAMPLE, SAMPLES, fetch_sample
from meshnet.errors import MeshnetError, UsageError

ROOT = Path(__file__).resolve().parent.parent
UNPATCHED = ROOT / "build" / "upstream-pristine" / "build" / "bin"
LATEST = ROOT / "build" / "bench" / "latest.json"
DOCS = ROOT / "docs" / "performance.md"


def main(arguments: list[str]) -> int:
    """Run the benchmark; 0, or 1 with a named error on stderr."""
    options = _parser().parse_args(arguments)
    try:
        setting = Setting(
            root=ROOT,
            model=fetch_sample(options.model, _say),
            llama_cpp=options.llama_cpp,
            plan=_plan(options),
            subjects=_subjects(options.only),
            say=_say,
        )
        results = asyncio.run(run(setting))
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(to_json(results))
        print(text(results))
        _say(f"every sample is in {options.json}")
        if options.update_docs:
            write_docs(DOCS, results)
            _say(f"{DOCS} is updated")
    except MeshnetError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"bench: error: {error}{notes}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = Plan()
    parser = argparse.ArgumentParser(prog="python -m bench", description="Side-by-side timings; docs/performance.md.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, of: %(default)s")
    parser.add_argument("--model", default=DEFAULT_SAMPLE, choices=sorted(SAMPLES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, help=f"default: {defaults.rounds}")
    parser.add_argument("--decode-threads", type=int, help="per process; default: the fastest for llama.cpp")
    parser.add_argument("--prefill-threads", type=int, help=f"per process; default: {defaults.prefill_threads}")
    parser.add_argument("--chunk-tokens", type=int, help="prefill chunk of the routes; default: the worker's own")
    parser.add_argument("--patience-s", type=float, help=f"wait for a quiet machine; default: {defaults.patience_s:g}")
    parser.add_argument("--llama-cpp", type=Path, default=UNPATCHED, help="where llama.cpp's unpatched programs are")
    parser.add_argument("--json", type=Path, default=LATEST, help="default: %(default)s")
    parser.add_argument("--update-docs", action="store_true", help="write the tables into docs/performance.md")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    names = ("rounds", "decode_threads", "prefill_threads", "chunk_tokens", "patience_s")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        if value < (0 if name in ("chunk_tokens", "patience_s") else 1):
            raise UsageError(f"--{name.replace('_', '-')} {value} is too small")
    return dataclasses.replace(QUICK if options.quick else Plan(), **given)


def _subjects(only: str) -> frozenset[str]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown or not names:
        raise UsageError(f"--only {only!r}: choose from {', '.join(SUBJECTS)}")
    return frozenset(SUBJECTS[name] for name in names)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
