"""Writes docs/architectures.md: which architectures can be cut where. Not typed, but found by trying.

``python -m tests.parity.arch_table write`` sweeps all of them and writes the table; ``check`` compares it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import astuple

from tests.parity.arch_sweep import Fixture, Row, fixtures, sweep
from tests.parity.tool import ROOT, in_parallel

TABLE = ROOT / "docs" / "architectures.md"
_COLUMNS = ("architecture", "variant", "layers", "legal cuts", "refused cuts", "boundary", "reads token ids", "note")
_HEAD = """\
# Architectures

Where each architecture can be cut into shards, as found by trying: `python -m tests.parity.arch_table write` made this
table, and `make test` checks a sample of it (`make parity`: all). How it is done is told in [parity.md](parity.md).

The models are those of upstream's own test fixture: tiny, with random weights, their layers stacked twice where the
architecture allows it. A cut before layer *k* gives the shards `[0, k)` and `[k, n)`.

- **legal cuts**: the split model's logits are bit for bit those of the whole model, in two shards and with a shard
  between any two legal cuts; a changed boundary changes the output, and so do wrong token ids, exactly where they are
  read.
- **refused cuts**: a worker refuses to load such a range, with this reason.
- **boundary**: what crosses a legal cut for each token: name, type, shape.
- **reads token ids**: whether shards after the first read token ids and not only the boundary.
- **note**: why a model could not be tried. Nothing is known of it; its legal cuts are still derived from its graph when
  it is loaded.

"""


def write(rows: Iterable[Row]) -> None:
    """Write the table."""
    ordered = sorted(rows, key=lambda row: row.key)
    swept = [row for row in ordered if row.layers]
    cuttable = [row for row in swept if row.legal_cuts != "none"]
    summary = (
        f"{len(swept)} models of {len({row.architecture for row in swept})} architectures were tried: {len(cuttable)} "
        f"can be cut, {len(swept) - len(cuttable)} only run whole; {len(ordered) - len(swept)} models could not be "
        "tried.\n\n"
    )
    lines = [_line(_COLUMNS), _line("---" for _ in _COLUMNS), *(_line(astuple(row)) for row in ordered)]
    TABLE.write_text(_HEAD + summary + "\n".join(lines) + "\n")


def read() -> dict[tuple[str, str], Row]:
    """The table's rows by architecture and variant.

    Raises:
        ValueError: a line of the table does not have the right columns.
    """
    rows = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| architecture |", "| --- |")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != len(_COLUMNS):
                raise ValueError(f"{TABLE.name}: {line!r} does not have {len(_COLUMNS)} columns")
            row = Row(*cells)
            rows[row.key] = row
    return rows


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _report(fixture: Fixture) -> tuple[Row, list[str]]:
    row, problems = sweep(fixture)
    result = row.note or f"legal {row.legal_cuts}" + (f", refused {row.refused_cuts}" if row.refused_cuts else "")
    print(f"{row.architecture} {row.variant}: {result}", *problems, sep="\n    ", flush=True)
    return row, problems


def main(arguments: list[str]) -> int:
    """Sweep all architectures; then write the table, or compare it."""
    if arguments not in (["write"], ["check"]):
        print("usage: python -m tests.parity.arch_table write|check", file=sys.stderr)
        return 2
    found = in_parallel(_report, fixtures())
    wrong = sum(bool(problems) for _, problems in found)
    if arguments == ["write"]:
        write(row for row, _ in found)
    else:
        table = read()
        for row, _ in found:
            if table.get(row.key) != row:
                wrong += 1
                print(f"{row.architecture} {row.variant}: found {row}, but the table has {table.get(row.key)}")
    print(f"{len(found)} models, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
