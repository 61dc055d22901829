"""The llama engine itself: several sessions at once, rollback, repaired routes, bad input. The tests are native
(native/parity), on tiny models; this runs them, one process per model and theme."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.parity.tool import FULL, in_parallel, native_program, seeded
from tests.support.tiny_models import TINY_MODELS, tiny_model

#: Models and themes of a sample; `make parity` runs them all.
SAMPLE = {"Batches": 2, "Parts": 1, "Refusals": 1, "Repair": 1, "Rollback": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for architecture in TINY_MODELS:
        (directory / f"{architecture}.gguf").symlink_to(tiny_model(architecture))
    return directory


def _run(arguments: list[str], models: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [native_program("meshnet_parity_tests"), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "MESHNET_PARITY_MODELS": str(models), "TEST_TMPDIR": str(models)},
        timeout=1800.0,
    )


def _filters(models: Path) -> dict[str, list[str]]:
    """Filters of the native tests: by theme, one per model."""
    filters: dict[str, set[str]] = {}
    suite = ""
    for line in _run(["--gtest_list_tests"], models).stdout.splitlines():
        line = line.partition("#")[0].rstrip()
        if not line.startswith(" "):
            suite = line
        elif suite:
            theme = re.sub(r"^Models/|\.$", "", suite)
            model = line.partition("/")[2]
            filters.setdefault(theme, set()).add(f"{suite}*/{model}" if model else f"{suite}*")
    return {theme: sorted(names) for theme, names in filters.items()}


def test_the_engine(models: Path) -> None:
    filters = _filters(models)
    assert set(filters) == {"Batches", "Loading", "Parts", "Refusals", "Repair", "Rollback"}
    choice = seeded("engine")
    chosen = []
    for theme, names in filters.items():
        chosen += names if FULL or theme not in SAMPLE else choice.sample(names, SAMPLE[theme])
    print("native tests:", ", ".join(chosen))
    failures = []
    for name, run in zip(
        chosen,
        in_parallel(lambda name: _run([f"--gtest_filter={name}", "--gtest_brief=1"], models), chosen),
        strict=True,
    ):
        passed = re.search(r"\[  PASSED  \] (\d+) tests?\.", run.stdout)
        if run.returncode != 0 or passed is None or int(passed.group(1)) == 0:
            failures.append(f"{name} ended with {run.returncode}:\n{run.stdout[-4000:]}{run.stderr[-1000:]}")
    assert not failures, "\n".join(failures)
