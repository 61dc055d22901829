"""``meshnet plan``: before any download, whether a model fits on some machines, who would hold what, and how fast."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.core import MAX_SESSION_TOKENS, LayerRange
from meshnet.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from meshnet.planner.model_facts import ModelFacts
    from meshnet.planner.plan import OneMore, Plan, Request

_DESCRIBE_TIMEOUT_S = 120.0


def plan(
    manifest: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A manifest, a GGUF file, a facts file (.toml), or an artifact of the store by name or digest.",
        ),
    ],
    nodes: Annotated[Path, typer.Option(metavar="FILE", help="The machines: nodes.toml, see docs/planning.md.")],
    context: Annotated[
        int, typer.Option(min=1, max=MAX_SESSION_TOKENS, metavar="TOKENS", help="Most tokens of one session.")
    ] = 4096,
    sessions: Annotated[int, typer.Option(min=1, max=4096, help="Sessions at once.")] = 4,
    replicas: Annotated[int, typer.Option(min=1, max=100, help="Nodes that should hold each layer.")] = 1,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_SESSION_TOKENS, help="Prompt that the time to first token is told of.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Tell whether a model fits on some machines, who would hold what, and how fast it would be.

    Exit code 2 if it does not fit.
    """
    from meshnet.planner.nodes_file import NodesFile
    from meshnet.planner.plan import Request, make_plan

    facts = _facts(manifest)
    if facts.n_ctx_train is not None and context > facts.n_ctx_train:
        raise UsageError(f"--context {context} is more than {facts.name} was made for ({facts.n_ctx_train} tokens)")
    if prompt_tokens > context:
        raise UsageError(f"--prompt-tokens {prompt_tokens} does not fit --context {context}")
    request = Request(context, sessions, prompt_tokens, replicas)
    made = make_plan(facts, NodesFile.read(nodes), request)
    if as_json:
        print(json.dumps(_told(facts, request, made), indent=1))
    else:
        _show(facts, request, made)
    if not made.fits:
        raise typer.Exit(2)


def _facts(model: str) -> ModelFacts:
    """Whatever ``model`` names."""
    from meshnet.planner.model_facts import ModelFacts
    from meshnet.planner.model_reading import facts_of, facts_of_file

    path = Path(model)
    if path.suffix == ".toml":
        return ModelFacts.from_toml(path)
    if path.is_file():
        found = _manifest(path)
        return _as_cut(path, facts_of_file(path)) if found is None else facts_of(found.artifact, found.name)
    if path.suffix in (".gguf", ".json"):
        raise UsageError(f"there is no file {path}")
    from meshnet.artifact.library import Library
    from meshnet.artifact.splits import read_model_headers

    stored = Library().need(model)
    try:
        headers = read_model_headers(stored.paths[0])
    except ArtifactError:
        # Not fetched yet: the manifest tells most of it.
        return facts_of(stored.bundle.artifact, stored.bundle.manifest.name)
    return _as_cut(stored.paths[0], facts_of(stored.bundle.artifact, stored.bundle.manifest.name, headers))


def _as_cut(path: Path, facts: ModelFacts) -> ModelFacts:
    """``facts`` with the cuts that the engine itself finds legal, if there is a worker here to ask. It reads metadata
    only."""
    from meshnet.engines.native import find_worker

    try:
        command = [str(find_worker()), "--model", str(path), "--layers", "all", "--describe"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DESCRIBE_TIMEOUT_S)
        cuts = json.loads(ran.stdout.splitlines()[0]).get("legalCuts", []) if ran.returncode == 0 else None
        told = None if cuts is None else tuple(sorted(int(cut) for cut in cuts if 0 < int(cut) < facts.n_layer))
    except (UsageError, OSError, subprocess.SubprocessError, ValueError, IndexError, AttributeError, TypeError):
        told = None
    if told is None:
        guess = "the model can be cut as others of its architecture (no worker here could be asked)"
        return facts.model_copy(update={"assumed": (*facts.assumed, guess)})
    return facts.model_copy(update={"legal_cuts": told})


def _manifest(path: Path) -> Any:
    """The manifest at ``path``; None if it is something else."""
    from meshnet.artifact.manifest import MAX_MANIFEST_BYTES, Manifest

    try:
        with path.open("rb") as file:
            if not file.read(64).lstrip().startswith(b"{"):
                return None
            file.seek(0)
            return Manifest.parse(file.read(MAX_MANIFEST_BYTES + 1))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None


# ------------------------------------------------------------------------------------------------------------ telling


def _told(facts: ModelFacts, request: Request, made: Plan) -> dict[str, Any]:
    """The plan as JSON. Times and rates are rounded to what a prediction is worth."""
    speeds = made.speeds
    return {
        "model": facts.name,
        "fingerprint": facts.fingerprint,
        "architecture": facts.architecture,
        "n_layer": facts.n_layer,
        "legal_cuts": list(facts.legal_cuts),
        **dataclasses.asdict(request),
        "fits": made.fits,
        "weight_bytes": facts.weight_bytes(facts.whole),
        "kv_bytes": facts.kv_bytes(facts.whole, request.context_tokens, request.sessions),
        "nodes": [
            {
                "node": held.node,
                "layers": str(held.layers) if held.layers else None,
                "weight_bytes": held.weight_bytes,
                "kv_bytes": held.kv_bytes,
                "buffer_bytes": held.buffer_bytes,
                "memory_bytes": held.memory_bytes,
                "allowed_bytes": held.allowed_bytes,
                "measured": held.measured,
            }
            for held in made.holdings
        ],
        "uncovered": [str(layers) for layers in made.uncovered],
        "missing_bytes": made.missing_bytes,
        "route": [{"node": node, "layers": str(layers)} for node, layers in speeds.route] if speeds else None,
        "first_token_ms": round(speeds.first_token_ms, 1) if speeds else None,
        "tokens_per_s": round(speeds.tokens_per_s, 3) if speeds else None,
        "all_tokens_per_s": round(speeds.all_tokens_per_s, 3) if speeds else None,
        "limiting": speeds.limiting if speeds else None,
        "one_more": [dataclasses.asdict(more) for more in made.one_more],
        "reasons": list(made.reasons),
        "assumed": list(facts.assumed),
    }


def _show(facts: ModelFacts, request: Request, made: Plan) -> None:
    from meshnet.cli.show import console, printable, size, table

    out = console()
    asked = f"{request.sessions} sessions of {request.context_tokens} tokens"
    kv = facts.kv_bytes(facts.whole, request.context_tokens, request.sessions)
    out.print(f"{printable(facts.name)}: {facts.n_layer} layers, {size(facts.weight_bytes(facts.whole))} of weights")
    out.print(f"{asked}: {size(kv)} of KV")
    out.print(
        table(
            "Who would hold what",
            ("node", "layers", "weights", "KV", "buffers", "together", "allowed", "speed"),
            [
                (
                    held.node,
                    str(held.layers) if held.layers else "nothing",
                    *(
                        size(n_bytes) if held.layers else ""
                        for n_bytes in (held.weight_bytes, held.kv_bytes, held.buffer_bytes, held.memory_bytes)
                    ),
                    size(held.allowed_bytes),
                    "measured" if held.measured else "estimated",
                )
                for held in made.holdings
            ],
            right=("weights", "KV", "buffers", "together", "allowed"),
        )
    )
    speeds = made.speeds
    if speeds is None:
        out.print(f"It does not fit: {_missing(made.uncovered)}, {size(made.missing_bytes)} ({made.missing_bytes} B)")
    else:
        route = " - ".join(f"{node} {layers}" for node, layers in speeds.route)
        out.print(f"It fits. Route: {route}")
        out.print(f"first token after {_ms(speeds.first_token_ms)} for a prompt of {request.prompt_tokens} tokens")
        out.print(f"{speeds.tokens_per_s:.2f} tokens/s alone, up to {speeds.all_tokens_per_s:.2f} in all sessions")
        out.print(f"limiting: {speeds.limiting}")
    out.print(
        table(
            "One more machine",
            ("like", "fits", "first token", "tokens/s", "tokens/s in all"),
            [_more_row(more) for more in made.one_more],
            right=("first token", "tokens/s", "tokens/s in all"),
        )
    )
    for reason in made.reasons:
        out.print(reason)
    for guess in facts.assumed:
        out.print(f"assumed: {guess}")


def _more_row(more: OneMore) -> tuple[str, ...]:
    if more.first_token_ms is None or more.tokens_per_s is None or more.all_tokens_per_s is None:
        return more.like, "no", "", "", ""
    return more.like, "yes", _ms(more.first_token_ms), f"{more.tokens_per_s:.2f}", f"{more.all_tokens_per_s:.2f}"


def _missing(uncovered: tuple[LayerRange, ...]) -> str:
    return f"no node has room for layers {', '.join(map(str, uncovered))}"


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"
