"""Workers of a route are killed, stopped, cut off and slowed down in the middle of answers.

With a spare for each range, the client gets the very answer that it would have got; without one, an error with its
cause. ``MESHNET_KILLS`` says how many cases (``make kill-matrix`` takes 200), ``MESHNET_KILL_SEED`` which ones.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.artifact.samples import fetch_sample
from tests.support.kill_cases import FAULTS, VICTIMS, Case, Killer, Outcome, Sizes, draw_cases
from tests.support.kill_mesh import kill_mesh
from tests.support.tiny_models import tiny_model

KILLS = int(os.environ.get("MESHNET_KILLS", "12"))
SEED = int(os.environ.get("MESHNET_KILL_SEED", str(random.SystemRandom().randrange(10**6))))
#: Enough time for every fault of every victim also where few cases do.
FULL = KILLS >= 100
LOG = os.environ.get("MESHNET_KILL_LOG")
NODE_OPTIONS = ("--context", "1536", "--sessions", "2", "--chunk-tokens", "64")
THIRDS = ("0:2", "2:4", "4:6")

#: A near network's, in all that goes to a worker. A tiny model's answer is else over before anybody can break it.
LINK_DELAY_S = 0.003
#: A fault that finds the answer complete is tried again.
ATTEMPTS = 3
#: How much later everything arrives on a link that is only slow.
SLOW_IN_TIME_S = 0.03
#: SmolLM2 computes some tens of tokens a second beside other work.
REAL_SIZES = Sizes(short_tokens=24, long_tokens=400, max_tokens=48, seeds=2)
#: The gateway gives up a repair after this long without a spare …
REPAIR_TIMEOUT_S = 3.0
#: … and has noticed what breaks at once, and what hangs by pings without an answer; with room for a busy machine.
FAILED_WITHIN_S = {"crash": 8.0, "cut": 8.0, "hang": 12.0, "slow": 12.0}


def told_seed() -> str:
    return f"MESHNET_KILL_SEED={SEED}"


async def run_matrix(killer: Killer, count: int, seed: int) -> list[Outcome]:
    """All cases, each on a mesh that is whole again."""
    outcomes, broken, told = [], [], 0
    for number, case in enumerate(draw_cases(count, seed, seeds=killer.sizes.seeds), start=1):
        await killer.undisturbed(case.question(killer.sizes))
        outcome = await killer.run(case)
        print(f"{number:4} {outcome}", flush=True)
        outcomes.append(outcome)
        try:
            await killer.check_repaired(outcome)
        except AssertionError as error:
            broken.append(str(error))
        try:
            await killer.mesh.mend()
        except AssertionError as error:
            broken.append(f"after {outcome}: {error}")
            await killer.mesh.renew()
        for fault in broken[told:]:
            print(f"     BROKEN {fault}", flush=True)
        told = len(broken)
    assert not broken, f"{told_seed()}: {len(broken)} of {count}:\n" + "\n".join(broken)
    return outcomes


@pytest.mark.timeout(300 + 15 * KILLS)
async def test_a_client_notices_nothing_but_a_pause(tmp_path: Path) -> None:
    print(told_seed())
    async with kill_mesh(
        tmp_path, tiny_model("llama"), THIRDS, node_options=NODE_OPTIONS, link_delay_s=LINK_DELAY_S
    ) as mesh:
        killer = Killer(mesh, log=Path(LOG) if LOG else None)
        outcomes = await run_matrix(killer, KILLS, SEED)
        await slow_is_not_lost(killer)
        await one_after_the_other(killer)
        await the_next_before_the_first_is_mended(killer)
    # The moments are hit: not many faults come when all is over. Of a dozen, chance may have several at the last token.
    assert sum(outcome.tokens_before is not None for outcome in outcomes) >= (0.75 if KILLS >= 100 else 0.5) * KILLS
    assert sum(bool(outcome.repairs) for outcome in outcomes) >= (0.5 if KILLS >= 100 else 0.25) * KILLS


async def slow_is_not_lost(killer: Killer) -> None:
    """Links that are slow, but keep every deadline, break nothing."""
    question = Case("slow", "middle", "decode", "seeded", True, 0.0, 1).question(killer.sizes)
    undisturbed = await killer.undisturbed(question)
    for replica in killer.mesh.replicas:
        replica.link.slow(delay_s=SLOW_IN_TIME_S)
    answer = await killer.mesh.ask(question)
    assert answer.telemetry is not None, answer.error
    assert answer.telemetry.repairs == ()
    assert answer.tokens == undisturbed.tokens
    # Each token goes once round the ring.
    assert answer.total_s > 3 * SLOW_IN_TIME_S * (killer.sizes.max_tokens - 1)
    await killer.mesh.mend()


async def one_after_the_other(killer: Killer) -> None:
    """Head, middle and tail of the route as it is then, each after some more tokens."""
    # Long enough that an answer does not end while it is asked who computes it.
    question = replace(Case("crash", "head", "decode", "seeded", True, 0.0, 2).question(killer.sizes), max_tokens=600)
    undisturbed = await killer.undisturbed(question)
    after_tokens = (10, 80, 160)
    killed: list[str] = []

    async def on_text(tokens: int) -> None:
        hop = len(killed)
        if hop < len(after_tokens) and tokens >= after_tokens[hop]:
            victim = (await killer.mesh.route())[hop]
            await killer.mesh.crash(victim)
            killed.append(victim.shard_id)

    answer = await killer.mesh.ask(question, on_text=on_text)
    assert answer.telemetry is not None, answer.error
    assert [repair.hop for repair in answer.telemetry.repairs] == killed
    assert (answer.done, answer.finish_reasons) == (True, ["length"])
    assert answer.tokens == undisturbed.tokens
    await killer.mesh.mend()


async def the_next_before_the_first_is_mended(killer: Killer) -> None:
    """The tail dies while the history is computed again because the middle did."""
    question = Case("crash", "middle", "prefill", "greedy", True, 0.9, 2).question(killer.sizes)
    question = replace(question, max_tokens=300)
    undisturbed = await killer.undisturbed(question)
    asking = asyncio.create_task(killer.mesh.ask(question))
    try:
        _, middle, tail = await killer.mesh.route()
        await killer.mesh.computed(middle, killer.sizes.long_tokens // 2)
        await killer.mesh.crash(middle)
        spare = next(each for each in killer.mesh.replicas if each.layers == middle.layers and each is not middle)
        await killer.mesh.computed(spare, 1)
        await killer.mesh.crash(tail)
        answer = await asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert answer.telemetry is not None, answer.error
    assert [repair.hop for repair in answer.telemetry.repairs] == [middle.shard_id, tail.shard_id]
    assert (answer.done, answer.finish_reasons) == (True, ["length"])
    assert answer.tokens == undisturbed.tokens
    await killer.mesh.mend()


@pytest.mark.timeout(300 + 3 * KILLS)
async def test_a_real_model_says_the_same(tmp_path: Path) -> None:
    print(told_seed())
    path = fetch_sample("smollm2-135m-instruct")
    options = ("--context", "512", "--sessions", "2", "--chunk-tokens", "64")
    async with kill_mesh(
        tmp_path, path, ("0:10", "10:20", "20:30"), node_options=options, link_delay_s=LINK_DELAY_S
    ) as mesh:
        killer = Killer(mesh, REAL_SIZES, log=Path(LOG) if LOG else None)
        await run_matrix(killer, max(2, KILLS // 10), SEED + 1)


@pytest.mark.timeout(900)
async def test_without_a_spare_the_cause_is_told_in_time(tmp_path: Path) -> None:
    print(told_seed())
    draw = random.Random(SEED)
    cases = [
        Case(fault, victim, draw.choice(("prefill", "decode")), "greedy", draw.random() < 0.5, draw.random(), 1)
        for fault in FAULTS
        for victim in (VICTIMS if FULL else draw.sample(VICTIMS, 1))
    ]
    options = ("--repair-timeout-s", f"{REPAIR_TIMEOUT_S:g}")
    async with kill_mesh(
        tmp_path,
        tiny_model("llama"),
        THIRDS,
        replicas=1,
        serve_options=options,
        node_options=NODE_OPTIONS,
        link_delay_s=LINK_DELAY_S,
    ) as mesh:
        killer = Killer(mesh)
        for case in cases:
            await killer.undisturbed(case.question(killer.sizes))
            for _ in range(ATTEMPTS):
                outcome = await killer.run(case, lasting=True)
                print(outcome, outcome.answer.error, flush=True)
                if outcome.tokens_before is not None:
                    break
            assert outcome.tokens_before is not None, f"{told_seed()}: {case} came too late"
            await killer.check_failed(outcome, deadline_s=FAILED_WITHIN_S[case.fault])
            await mesh.mend()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", VICTIMS if FULL else [random.Random(SEED).choice(VICTIMS[1:])])
async def test_whoever_is_blamed_for_a_broken_link_a_route_that_is_there_is_found(tmp_path: Path, victim: str) -> None:
    """Only the victim has a spare: who blames its neighbour, and leaves that out, is left without a route."""
    print(told_seed())
    draw = random.Random(SEED)
    spares = (THIRDS[VICTIMS.index(victim)],)
    async with kill_mesh(
        tmp_path,
        tiny_model("llama"),
        THIRDS,
        spares=spares,
        node_options=NODE_OPTIONS,
        link_delay_s=LINK_DELAY_S,
    ) as mesh:
        killer = Killer(mesh)
        for moment in ("prefill", "prefill", "decode", "decode"):
            case = Case("cut", victim, moment, "greedy", True, draw.random(), 1)
            await killer.undisturbed(case.question(killer.sizes))
            outcome = await killer.run(case)
            print(outcome, flush=True)
            await killer.check_repaired(outcome)
            await mesh.mend()
