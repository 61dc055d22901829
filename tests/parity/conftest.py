"""Says at the top of the output what is run."""

from __future__ import annotations

from tests.parity.tool import FULL, SEED, cores


def pytest_report_header() -> str:
    what = "full sweeps" if FULL else f"a sample with seed {SEED} (MESHNET_PARITY_SEED; all of it: make parity)"
    return f"parity: {what}, on {cores()} cores"
