"""Every architecture that upstream's own tiny-model fixture can make, cut at every layer.

A model is made, swept and removed again. What its layers are is upstream's choice; they are stacked twice where the
architecture allows it, because most of these models have two layers and a shard in the middle needs three.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.parity.tool import Sweep, native_program, run_parity

MODEL_SEED = 1
#: How often the fixture's layers are stacked. Kimi-K3's residual starts anew every 12 layers.
_STACKED = {"kimi-k3": 7}
_MAKE_TIMEOUT_S = 300.0
#: Longer than the windows (32) and in chunks that do not divide it; the fixture's context is 256.
_CASES = ("--context", "256", "--prompts", "1,7,150", "--chunks", "0,16", "--new", "6", "--controls")


@dataclass(frozen=True, order=True)
class Fixture:
    """One model that the fixture may be able to make."""

    architecture: str
    variant: str  # "dense" or "moe"
    verdict: str  # "supported", or why upstream says that it is not


@dataclass(frozen=True)
class Row:
    """One line of the table. ``note`` says why there is nothing else."""

    architecture: str
    variant: str
    layers: str = ""
    legal_cuts: str = ""
    refused_cuts: str = ""
    boundary: str = ""
    reads_token_ids: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.architecture, self.variant


def fixtures() -> list[Fixture]:
    """All models of the fixture, in its order."""
    listing = subprocess.run(
        [native_program("meshnet-arch-models"), "list"], capture_output=True, text=True, check=True
    )
    return [Fixture(*line.split(" ", 2)) for line in listing.stdout.splitlines()]


def sweep(fixture: Fixture) -> tuple[Row, list[str]]:
    """The table's row for one model, and everything that is wrong."""
    supported = fixture.verdict == "supported"

    def only_note(note: str) -> tuple[Row, list[str]]:
        return Row(fixture.architecture, fixture.variant, note=note), []

    with tempfile.TemporaryDirectory(prefix="meshnet-arch-") as directory:
        path = Path(directory) / "model.gguf"
        problem = ""
        for repeat in (_STACKED.get(fixture.architecture, 2), 1):
            problem = _make(fixture, repeat, path)
            if not problem:
                break
        if problem:
            return only_note(f"not made: {problem if supported else fixture.verdict}")
        try:
            found = run_parity(path, *_CASES, "--routes", "all;finest", timeout_s=900.0)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            if not supported:
                return only_note(f"not loaded: {fixture.verdict}")
            return only_note("FAILED")[0], [str(error).replace(directory, "")]
    refusal = found.model.refusal
    if refusal is not None and (supported or "generates token by token" in refusal):
        return only_note(f"refused: {refusal.replace(str(path), path.name)}")
    problems = _problems(found)
    # Upstream has given up on some of its models; of these too, none may compute something else when it is split.
    different = any(route.result == "DIFFERENT" for route in found.failures)
    if not supported and not different and (refusal is not None or problems):
        return only_note(f"not judged: {fixture.verdict}")
    return _row(fixture, found), problems


def _make(fixture: Fixture, repeat: int, path: Path) -> str:
    """Write the model; what went wrong, if anything did."""
    command = [str(native_program("meshnet-arch-models")), "make", fixture.architecture, fixture.variant]
    try:
        run = subprocess.run(
            [*command, str(repeat), str(MODEL_SEED), str(path)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_MAKE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not within {_MAKE_TIMEOUT_S:g} s"
    if run.returncode == 0:
        return ""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line or "ASSERT" in line), lines[-1] if lines else "aborted")


def _problems(found: Sweep) -> list[str]:
    problems = [str(route) for route in found.failures]
    n_layer = found.model.n_layer
    single = {route.cuts[0]: route for route in found.routes if len(route.cuts) == 1 and route.result != "controls"}
    if set(single) != set(range(1, n_layer)):
        problems.append(f"cuts {sorted(single)} were tried, not all of 1 to {n_layer - 1}")
    equal = {cut for cut, route in single.items() if route.result == "equal"}
    if equal != set(found.model.legal_cuts):
        problems.append(f"cuts {sorted(equal)} work, but {list(found.model.legal_cuts)} are called legal")
    for cut, route in single.items():
        reason = found.model.illegal_cuts.get(cut, "")
        if route.result == "refused" and (not reason or reason not in route.detail):
            problems.append(f"cut {cut} is refused with {route.detail!r}, but described with {reason!r}")
    finest = found.routes[-1] if found.routes else None
    if len(found.model.legal_cuts) > 1 and (finest is None or finest.cuts != found.model.legal_cuts):
        problems.append("the finest route was not tried")
    controlled = {route.cuts for route in found.named("controls")}
    if any(route.cuts and route.cuts not in controlled for route in found.named("equal")):
        problems.append("a route was not controlled")
    return problems


def _row(fixture: Fixture, found: Sweep) -> Row:
    routes = {route.cuts[0]: route for route in found.named("equal") if len(route.cuts) == 1}
    boundaries = {route.boundaries[0] for route in routes.values()}
    readers = [cut for cut, route in sorted(routes.items()) if route.reads_token_ids[1]]
    if not routes:
        reads = ""
    elif not readers:
        reads = "no"
    else:
        reads = "yes" if len(readers) == len(routes) else f"after cuts {_numbers(readers)}"
    reasons: dict[str, list[int]] = {}
    for cut, reason in sorted(found.model.illegal_cuts.items()):
        reasons.setdefault(_plain(reason), []).append(cut)
    return Row(
        fixture.architecture,
        fixture.variant,
        layers=str(found.model.n_layer),
        legal_cuts=_numbers(found.model.legal_cuts),
        refused_cuts="; ".join(f"{_numbers(cuts)}: {reason}" for reason, cuts in reasons.items()),
        boundary=" or ".join(sorted(boundaries)),
        reads_token_ids=reads,
    )


def _numbers(cuts: Sequence[int]) -> str:
    """Rising numbers, runs of three or more as ``3-7``."""
    runs: list[list[int]] = []
    for cut in cuts:
        if runs and runs[-1][-1] == cut - 1:
            runs[-1].append(cut)
        else:
            runs.append([cut])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts) or "none"


def _plain(reason: str) -> str:
    # Tensors that upstream does not name are numbered as they come.
    return re.sub(r"\b(node|leaf)_\d+", r"\1_N", reason)
