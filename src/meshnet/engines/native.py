"""The native worker binary ``meshnet-shard``: where it is, and how it is asked for a range of layers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from meshnet.core import LayerRange
from meshnet.errors import UsageError

BINARY = "meshnet-shard"
ENVIRONMENT = "MESHNET_WORKER"
#: The worker checks tickets with this key (hex).
KEY_ENVIRONMENT = "MESHNET_WORKER_KEY"

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parents[1]
#: Packaged first, then what `make worker` builds in a checkout, then a build without llama.cpp for development.
PLACES = (
    _PACKAGE / "bin" / BINARY,
    _CHECKOUT / "build" / "native" / "bin" / BINARY,
    _CHECKOUT / "build" / "native-dev" / "bin" / BINARY,
)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is to load and how much it may take. ``None`` leaves a limit to the worker's own default.

    ``layers`` None means all layers; ``engine`` is ``llama`` or ``test`` (then ``model`` is ``test:<n_layer>``).
    """

    model: str
    layers: LayerRange | None
    engine: str = "llama"
    threads: int | None = None
    context_tokens: int | None = None
    sessions: int | None = None
    step_tokens: int | None = None
    chunk_tokens: int | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None


def find_worker() -> Path:
    """The worker binary.

    Raises:
        UsageError: there is none, or ``MESHNET_WORKER`` names something that cannot be run.
    """
    configured = os.environ.get(ENVIRONMENT, "").strip()
    if configured:
        path = Path(configured)
        if not _runnable(path):
            raise UsageError(f"{ENVIRONMENT} is {configured}, which is not an executable file")
        return path.resolve()
    for path in PLACES:
        if _runnable(path):
            return path
    raise UsageError(
        f"the worker {BINARY} is not built (looked for {', '.join(map(str, PLACES))}); "
        f"run `make worker`, or set {ENVIRONMENT} to its path"
    )


def worker_command(
    binary: Path, options: WorkerOptions, *, listen: str, shard_id: str, model_name: str, artifact_digest: str
) -> list[str]:
    """The command line that serves ``options`` at ``listen`` (host:port) until its standard input closes."""
    command = [
        str(binary),
        *("--model", options.model),
        *("--layers", str(options.layers) if options.layers is not None else "all"),
        *("--engine", options.engine),
        *("--listen", listen),
        *("--shard-id", shard_id),
        *("--model-name", model_name),
        *("--artifact-digest", artifact_digest),
        "--exit-with-parent",
    ]
    return [*command, *_limits(options)]


def needs_command(binary: Path, options: WorkerOptions) -> list[str]:
    """The command line that tells which tensors outside its layers ``options`` reads; it ends by itself."""
    layers = str(options.layers) if options.layers is not None else "all"
    return [str(binary), "--model", options.model, "--layers", layers, *_limits(options), "--needs"]


def _limits(options: WorkerOptions) -> list[str]:
    limits = {
        "--threads": options.threads,
        "--context": options.context_tokens,
        "--sessions": options.sessions,
        "--step-tokens": options.step_tokens,
        "--chunk-tokens": options.chunk_tokens,
        "--kv-type-k": options.kv_type_k,
        "--kv-type-v": options.kv_type_v,
    }
    return [text for flag, value in limits.items() if value is not None for text in (flag, str(value))]


def _runnable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
