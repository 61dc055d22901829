"""docs/architectures.md is what trying out the architectures finds."""

from __future__ import annotations

from tests.parity.arch_sweep import Fixture, fixtures, sweep
from tests.parity.arch_table import read
from tests.parity.tool import FULL, in_parallel, seeded

SAMPLE = 14
#: In every sample: a boundary of several streams, cuts that are refused, and shards that read token ids.
ALWAYS = ("deepseek4", "glm-dsa", "hy_v4", "talkie", "nemotron_h")


def _chosen() -> list[Fixture]:
    every = fixtures()
    if FULL:
        return every
    always = [fixture for fixture in every if fixture.architecture in ALWAYS]
    others = [fixture for fixture in every if fixture not in always and fixture.verdict == "supported"]
    return always + sorted(seeded("architectures").sample(others, SAMPLE))


def test_architectures_are_as_the_table_says() -> None:
    table = read()
    chosen = _chosen()
    print("architectures:", ", ".join(f"{fixture.architecture} {fixture.variant}" for fixture in chosen))
    problems = []
    for row, wrong in in_parallel(sweep, chosen):
        problems += [f"{row.architecture} {row.variant}: {what}" for what in wrong]
        if table.get(row.key) != row:
            problems.append(
                f"{row.architecture} {row.variant}: found {row}, but the table has {table.get(row.key)}; if the change "
                "is meant, run `python -m tests.parity.arch_table write`"
            )
    assert not problems, "\n".join(problems)


def test_the_table_has_every_model_of_the_fixture() -> None:
    assert set(read()) == {(fixture.architecture, fixture.variant) for fixture in fixtures()}


def test_the_table_says_nothing_is_wrong() -> None:
    rows = read().values()
    assert not [row for row in rows if "FAILED" in row.note]
    tried = {row.architecture for row in rows if row.layers}
    assert len(tried) >= 125, "fewer architectures than have been cut before"
    whole_only = {row.architecture for row in rows if row.legal_cuts == "none"}
    assert whole_only == {"hrm_text", "rwkv7"}
