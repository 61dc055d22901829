"""The native parity programs, and how tests run them.

``meshnet-parity`` compares routes of one model with the whole model, logit by logit; see docs/parity.md. One process
uses one thread, so that as many run at once as there are cores: faster than threads, which wait for each other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
#: The full sweeps (`make parity`), not the sample.
FULL = os.environ.get("MESHNET_PARITY") == "full"
#: Of everything that a sample chooses. Fixed, so that a failure comes back; set MESHNET_PARITY_SEED for another sample.
SEED = int(os.environ.get("MESHNET_PARITY_SEED", "1"))

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def native_program(name: str) -> Path:
    """A program of the native build; the failure names the make target."""
    return _program(ROOT / "build" / "native" / "bin" / name, "make native")


def reference_program() -> Path:
    """``meshnet-reference`` linked to unpatched llama.cpp."""
    return _program(ROOT / "build" / "upstream-pristine" / "build" / "bin" / "meshnet-reference", "make reference")


def _program(path: Path, target: str) -> Path:
    if not os.access(path, os.X_OK):
        raise AssertionError(f"{path} is not built; run `{target}`")
    return path


def seeded(purpose: str) -> random.Random:
    """Choices of one test, independent of those of the others."""
    return random.Random(f"{SEED} {purpose}")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def in_parallel(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """``work`` on all items, one per core at a time; results in order. The first failure is raised at the end."""
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(work, items))


@dataclass(frozen=True)
class Model:
    """What the whole model says of itself; ``refusal`` if it cannot be served at all."""

    architecture: str = ""
    n_layer: int = 0
    legal_cuts: tuple[int, ...] = ()
    illegal_cuts: dict[int, str] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True)
class RouteResult:
    """One line about one route. ``result`` is ``equal``, ``refused``, ``controls`` or a failure in capitals."""

    cuts: tuple[int, ...]
    result: str
    detail: str
    boundaries: tuple[str, ...] = ()
    reads_token_ids: tuple[bool, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"cuts {','.join(map(str, self.cuts)) or 'none'}: {self.result} ({self.detail})"


@dataclass(frozen=True)
class Sweep:
    """What one run of ``meshnet-parity`` found."""

    model: Model
    routes: tuple[RouteResult, ...]

    def named(self, result: str) -> list[RouteResult]:
        return [route for route in self.routes if route.result == result]

    @property
    def failures(self) -> list[RouteResult]:
        return [route for route in self.routes if route.result not in ("equal", "refused", "controls", "trace")]


def run_parity(model: Path, *arguments: str, timeout_s: float = 3600.0) -> Sweep:
    """Run ``meshnet-parity`` with one thread, unless the arguments say otherwise.

    Raises:
        AssertionError: it did not run to its end.
    """
    command = [str(native_program("meshnet-parity")), "--model", str(model), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s)
    # llama.cpp writes there too now and then.
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode not in (0, 1) or not lines:
        raise AssertionError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr[-2000:]}")
    first, *rest = lines
    if "architecture" not in first:
        if first["result"] != "refused":
            raise AssertionError(f"{model}: {first['detail']}")
        return Sweep(Model(refusal=first["detail"]), ())
    described = Model(
        architecture=first["architecture"],
        n_layer=first["n_layer"],
        legal_cuts=tuple(first["legal_cuts"]),
        illegal_cuts={cut: reason for cut, reason in first["illegal_cuts"]},
    )
    routes = tuple(
        RouteResult(
            cuts=tuple(line.pop("cuts")),
            result=line.pop("result"),
            detail=line.pop("detail"),
            boundaries=tuple(line.pop("boundaries", ())),
            reads_token_ids=tuple(line.pop("reads_token_ids", ())),
            fields=line,
        )
        for line in rest
    )
    sweep = Sweep(described, routes)
    if (run.returncode != 0) != bool(sweep.failures):
        raise AssertionError(f"{' '.join(command)} ended with {run.returncode}, but said: {run.stdout[-2000:]}")
    return sweep


def routes_argument(routes: Iterable[Sequence[int]]) -> str:
    """Cuts as ``--routes`` takes them."""
    return ";".join(",".join(map(str, cuts)) or "none" for cuts in routes)


def random_cuts(choice: random.Random, n_layer: int, n_shards: int) -> tuple[int, ...]:
    """A route of ``n_shards`` shards of any lengths."""
    return tuple(sorted(choice.sample(range(1, n_layer), n_shards - 1)))
