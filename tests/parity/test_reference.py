"""Our engine against llama.cpp itself: the same commit without patches, through nothing but its public interface.

A route of one shard, and one of two, give bit for bit the logits of ``native/parity/reference.cpp`` linked to the
unpatched library: compared are the chosen tokens and a hash of every row of logits.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from meshnet.artifact.samples import fetch_sample
from tests.parity.tool import FULL, RouteResult, cores, in_parallel, reference_program, run_parity, seeded

MODELS = {"smollm2-135m-instruct": 30, "gemma-3-270m": 18}
#: Gemma's window is 512 tokens.
PROMPTS = (1, 7, 100, 1500) if FULL else (7, 600)
NEW_TOKENS = 128 if FULL else 24


class Case(NamedTuple):
    model: Path
    cut: int
    n_prompt: int
    chunk: int  # at once if not less than the prompt
    threads: int


class Reference(NamedTuple):
    tokens: list[int]
    logits_fnv1a: list[str]


def _cases(model: str) -> list[Case]:
    path = fetch_sample(model)
    choice = seeded(f"reference {model}")
    cases = []
    for n_prompt in PROMPTS:
        for chunk in (n_prompt, 64) if n_prompt > 64 else (n_prompt,):
            cases.append(Case(path, choice.randrange(1, MODELS[model]), n_prompt, chunk, 1))
    cases.append(Case(path, choice.randrange(1, MODELS[model]), 100, 100, max(2, cores())))
    return cases


def _context(case: Case) -> str:
    return str(-(-(case.n_prompt + NEW_TOKENS) // 256) * 256)


def _ours(case: Case) -> tuple[RouteResult, ...]:
    return run_parity(
        case.model,
        *("--routes", f"none;{case.cut}", "--trace", "--new", str(NEW_TOKENS), "--threads", str(case.threads)),
        *("--prompts", str(case.n_prompt), "--chunks", str(case.chunk)),
        *("--context", _context(case), "--step-tokens", str(case.chunk)),
    ).routes


def _theirs(case: Case, prompt: list[int]) -> Reference:
    numbers = [case.threads, _context(case), case.chunk, NEW_TOKENS, *prompt]
    run = subprocess.run(
        [str(reference_program()), str(case.model), *map(str, numbers)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1800.0,
    )
    assert run.returncode == 0, run.stderr
    steps = [line.split() for line in run.stdout.splitlines()]
    return Reference([int(token) for token, _ in steps], [row for _, row in steps])


def _compare(case: Case) -> str:
    whole, split = _ours(case)
    reference = _theirs(case, whole.fields["prompt"])
    assert len(reference.tokens) == NEW_TOKENS
    assert len(set(reference.logits_fnv1a)) > 1
    for route in (whole, split):
        found = Reference(route.fields["tokens"], route.fields["logits_fnv1a"])
        if found != reference:
            steps = zip(reference.logits_fnv1a, found.logits_fnv1a, strict=True)
            step = next((step for step, (expected, row) in enumerate(steps) if expected != row), "none")
            return f"{case}, cuts {route.cuts}: tokens or logits differ, logits first at step {step}"
    return ""


@pytest.mark.parametrize("model", MODELS)
def test_one_and_two_shards_equal_unpatched_llama_cpp(model: str) -> None:
    cases = _cases(model)
    print(*cases, sep="\n")
    # More threads than one are for a machine that does nothing else.
    problems = in_parallel(_compare, [case for case in cases if case.threads == 1])
    problems += [_compare(case) for case in cases if case.threads > 1]
    assert not any(problems), "\n".join(filter(None, problems))
