"""One Route Session: routes, admission, ends. Workers are real servers with written-down answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from meshnet.core import FinishCause, RouteSession
from meshnet.errors import (
    BadParameter,
    DeadlineExceeded,
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    Overloaded,
    PromptTooLong,
    TrackerUnavailable,
    UnknownModel,
)
from meshnet.gateway.generation import Generation, GenerationRequest
from meshnet.gateway.generations import Generations
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.generated import shard_pb2 as pb
from tests.support.gateway_server import TEST_SETTINGS, until
from tests.support.shard_server import BOS, EOS, Broken, ShardServer, failed
from tests.support.static_routes import StaticRoutes

FULL = pb.RefusalDetail(refusal=pb.REFUSAL_NO_CAPACITY, message="no slot")


def request(prompt: str | Prompt = "Hi", **changes: object) -> GenerationRequest:
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else prompt
    plain = GenerationRequest(model="tiny", prompt=prompt, sampling=pb.SamplingParams(), answer_tokens=16)
    return replace(plain, **changes)  # type: ignore[arg-type]


async def run(generations: Generations, wanted: GenerationRequest | None = None) -> Generation:
    """Generate to the end."""
    async with generations.start(wanted or request()) as generation:
        await pieces(generation)
    return generation


@asynccontextmanager
async def mesh(
    *servers: ShardServer, routes: StaticRoutes | None = None, **settings: object
) -> AsyncIterator[tuple[Generations, StaticRoutes]]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        routes = routes or StaticRoutes(())
        routes.shards = [server.shard for server in servers]
        routes.worker_keys = {server.shard_id: server.worker_key for server in servers}
        changed: GatewaySettings = replace(TEST_SETTINGS, **settings)  # type: ignore[arg-type]
        generations = Generations(routes, changed, GatewayMetrics())
        try:
            yield generations, routes
        finally:
            await generations.close()
        for server in servers:
            assert server.sessions == {}
        assert routes.open_sessions == set()


def halves(**head: object) -> tuple[ShardServer, ShardServer]:
    return (
        ShardServer(shard_id="head", layers=(0, 4), worker_key=b"k1", **head),  # type: ignore[arg-type]
        ShardServer(shard_id="tail", layers=(4, 8), worker_key=b"k2"),
    )


async def pieces(generation: Generation) -> list[bytes]:
    found = []
    while (token := await generation.next_token()) is not None:
        found.append(token.piece)
    return found


async def test_a_session_is_opened_on_every_hop_and_closed_with_telemetry() -> None:
    head, tail = halves()
    async with mesh(head, tail) as (generations, routes):
        async with generations.start(request(seed=-1)) as generation:
            assert await pieces(generation) == [b"Hello", b" ", b"world", b""]
            assert len(head.sessions) == len(tail.sessions) == 1
        assert head.sessions == tail.sessions == {}
        telemetry = generation.telemetry
        opened = [head.opened[0], tail.opened[0]]
        assert [(each.hop_index, each.n_hops, each.layers.start, each.layers.end) for each in opened] == [
            (0, 2, 0, 4),
            (1, 2, 4, 8),
        ]
        assert opened[0].next == pb.Peer(shard_id="tail", address=tail.address)
        assert not opened[1].HasField("next")
        assert opened[0].head == opened[1].head == pb.Peer(shard_id="head", address=head.address)
        assert opened[0].boundary_out_digest == opened[1].boundary_in_digest == "state"
        assert opened[0].token_capacity == opened[1].token_capacity == 3 + 16
        assert list(head.generated[0].tokens) == [BOS, *b"Hi"]
        # Every seed is reproducible: never the one that llama.cpp reads as "random".
        assert head.generated[0].sampling.seed == 0xFFFFFFFE

        assert (telemetry.prompt_tokens, telemetry.generated_tokens, telemetry.cached_tokens) == (3, 4, 0)
        assert telemetry.finish_cause == FinishCause.EOG
        assert telemetry.prefill_tokens_per_s == 150.0
        assert telemetry.decode_tokens_per_s == 75.0
        assert telemetry.ttft_ms is not None
        assert 0 < telemetry.ttft_ms <= telemetry.total_ms
        assert [(hop.shard, hop.layers) for hop in telemetry.hops] == [("head", "0:4"), ("tail", "4:8")]
        assert (telemetry.hops[0].queue_ms, telemetry.hops[0].compute_ms, telemetry.hops[0].network_ms) == (
            1.5,
            2.5,
            3.5,
        )
        assert telemetry.missing_hops == ()
    assert routes.ends == [(telemetry.session, FinishCause.EOG, 4)]


async def test_seeds_differ_unless_one_is_given() -> None:
    head = ShardServer()
    async with mesh(head) as (generations, _):
        for seed in (None, None, 7, 7):
            async with generations.start(request(seed=seed)) as generation:
                await pieces(generation)
    seeds = [each.sampling.seed for each in head.generated]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, 7]


async def test_the_length_ends_an_answer() -> None:
    async with mesh(ShardServer()) as (generations, _):
        async with generations.start(request(answer_tokens=2)) as generation:
            assert await pieces(generation) == [b"Hello", b" "]
        assert generation.telemetry.finish_cause == FinishCause.LENGTH


async def test_a_stop_string_cancels_the_rest() -> None:
    head = ShardServer(script=[b"a", b"b", asyncio.Event()])
    async with mesh(head) as (generations, routes):
        async with generations.start(request()) as generation:
            await generation.next_token()
            generation.stop()
        await asyncio.wait_for(head.cancelled.wait(), 5)
        assert generation.telemetry.finish_cause == FinishCause.STOP
    assert routes.ends[0][1] == FinishCause.STOP


async def test_a_cancelled_client_frees_every_hop() -> None:
    head, tail = halves(script=[b"a", asyncio.Event()])

    async def talk(generations: Generations) -> None:
        async with generations.start(request()) as generation:
            await pieces(generation)

    async with mesh(head, tail) as (generations, routes):
        task = asyncio.create_task(talk(generations))
        await asyncio.wait_for(head.generating.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert head.sessions == tail.sessions == {}
        await until(lambda: bool(routes.ends), "the end is recorded")
    assert routes.ends[0][1] == FinishCause.CANCELLED


@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancelled_while_a_hop_is_opening(cancels: int) -> None:
    """The Close waits for the Open that is under way, however often the caller is cancelled."""
    gate = asyncio.Event()
    head, tail = halves()
    tail.open_gate = gate
    async with mesh(head, tail) as (generations, routes):

        async def talk() -> None:
            async with generations.start(request()):
                pass

        task = asyncio.create_task(talk())
        await until(lambda: bool(head.opened), "the head is open")
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert tail.closed == head.closed
    assert len(tail.closed) == 1
    assert routes.ends[0][1] == FinishCause.CANCELLED


async def test_cancelled_while_the_tracker_chooses_a_route() -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    class Slow(StaticRoutes):
        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            entered.set()
            await gate.wait()
            return await super().open_session(model, **wanted)

    async with mesh(ShardServer(), routes=Slow(())) as (generations, routes):

        async def talk() -> None:
            async with generations.start(request()):
                pass

        task = asyncio.create_task(talk())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
    assert [end[1] for end in routes.ends] == [FinishCause.CANCELLED]


async def test_a_tracker_that_does_not_answer_in_time() -> None:
    gate = asyncio.Event()

    class Slow(StaticRoutes):
        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            await gate.wait()
            return await super().open_session(model, **wanted)

    async with mesh(ShardServer(), routes=Slow(()), call_timeout_s=0.1) as (generations, routes):
        with pytest.raises(TrackerUnavailable, match=r"no route within 0\.1 s"):
            await run(generations)
        gate.set()
    # The session that it opened too late is given back.
    assert [end[1] for end in routes.ends] == [FinishCause.CANCELLED]


async def test_a_refusal_leads_to_another_route() -> None:
    head, tail = halves()
    spare = ShardServer(shard_id="spare", layers=(4, 8))
    tail.open_refusal = pb.RefusalDetail(refusal=pb.REFUSAL_DRAINING)
    async with mesh(head, tail, spare) as (generations, routes):
        async with generations.start(request()) as generation:
            assert await pieces(generation) == [b"Hello", b" ", b"world", b""]
        assert [hop.shard for hop in generation.telemetry.hops] == ["head", "spare"]
    assert routes.avoided == [(), ("tail",)]
    assert [end[1] for end in routes.ends] == [FinishCause.FAILED, FinishCause.EOG]


async def test_a_lost_hop_at_open_leads_to_another_route() -> None:
    lost, spare = ShardServer(shard_id="lost"), ShardServer(shard_id="spare")
    async with mesh(lost, spare) as (generations, routes):
        await lost.stop()
        async with generations.start(request()) as generation:
            await pieces(generation)
    assert routes.avoided == [(), ("lost",)]


async def test_attempts_are_bounded() -> None:
    refusal = pb.RefusalDetail(refusal=pb.REFUSAL_WRONG_BUILD, message="another build")
    servers = [ShardServer(shard_id=f"s{index}", open_refusal=refusal) for index in range(5)]
    async with mesh(*servers, route_attempts=3) as (generations, routes):
        with pytest.raises(HopRefused, match="another build"):
            async with generations.start(request()):
                pass
    assert routes.avoided == [(), ("s0",), ("s0", "s1")]


async def test_full_everywhere_is_overload() -> None:
    servers = [ShardServer(shard_id="a", open_refusal=FULL), ShardServer(shard_id="b", open_refusal=FULL)]
    async with mesh(*servers) as (generations, _):
        with pytest.raises(Overloaded, match="every route is full"):
            async with generations.start(request()):
                pass


async def test_more_generations_than_the_gateway_runs() -> None:
    gate = asyncio.Event()
    async with mesh(ShardServer(script=[gate, b"a"]), max_running=1) as (generations, _):
        async with generations.start(request()) as generation:
            with pytest.raises(Overloaded, match="already runs 1"):
                async with generations.start(request()):
                    pass
            gate.set()
            await pieces(generation)
        async with generations.start(request()) as generation:
            await pieces(generation)


async def test_models_and_routes_that_do_not_exist() -> None:
    head, _ = halves()
    async with mesh(head) as (generations, _routes):
        with pytest.raises(UnknownModel):
            async with generations.start(request(model="huge")):
                pass
        with pytest.raises(NoRoute):
            async with generations.start(request()):
                pass


@pytest.mark.parametrize(
    ("prompt", "answer_tokens", "limits", "total", "limit"),
    [
        # One token more than fits, with BOS.
        ("x" * 95, 5, {"session_tokens": 100}, 101, 100),
        ("x" * 99, None, {"session_tokens": 100}, 101, 100),
        ("x" * 99, 1, {"n_ctx_train": 100}, 101, 100),
        ("x" * 131_071, None, {"session_tokens": 200_000, "n_ctx_train": 200_000}, 131_073, 131_072),
    ],
)
async def test_a_prompt_that_does_not_fit(
    prompt: str, answer_tokens: int | None, limits: dict[str, int], total: int, limit: int
) -> None:
    head = ShardServer(**limits)  # type: ignore[arg-type]
    async with mesh(head) as (generations, _):
        with pytest.raises(PromptTooLong, match=f"holds {limit} tokens") as caught:
            async with generations.start(request(prompt, answer_tokens=answer_tokens)):
                pass
        assert (caught.value.requested_tokens, caught.value.limit_tokens) == (total, limit)
        assert head.opened == []
        async with generations.start(request(prompt[:-1], answer_tokens=answer_tokens)) as generation:
            await pieces(generation)
        assert head.opened[0].token_capacity == limit


async def test_a_hop_that_holds_less_than_it_advertised() -> None:
    detail = pb.RefusalDetail(refusal=pb.REFUSAL_TOO_LONG, requested=20, limit=3)
    async with mesh(ShardServer(open_refusal=detail)) as (generations, _):
        with pytest.raises(PromptTooLong) as caught:
            async with generations.start(request()):
                pass
    assert caught.value.limit_tokens == 3


@pytest.mark.parametrize(
    ("wanted", "param", "reason"),
    [
        (request(TokenPrompt([5, 300])), "prompt", "token 300 is not in the model's vocabulary of 258"),
        (request(sampling=pb.SamplingParams(logit_bias={258: 1})), "logit_bias", "'logit_bias' names token 258"),
        (request(TextPrompt("")), "prompt", "no tokens"),
    ],
)
async def test_prompts_that_no_model_can_take(wanted: GenerationRequest, param: str, reason: str) -> None:
    head = ShardServer(adds_bos=False)
    async with mesh(head) as (generations, _):
        with pytest.raises(BadParameter, match=reason) as caught:
            await run(generations, wanted)
    assert caught.value.param == param
    assert head.opened == []


async def test_token_prompts_are_taken_as_they_are() -> None:
    head = ShardServer()
    async with mesh(head) as (generations, _):
        await run(generations, request(TokenPrompt([1, 2, EOS])))
    assert list(head.generated[0].tokens) == [1, 2, EOS]
    assert head.tokenized == []


@pytest.mark.parametrize(
    ("template", "adds_bos"), [("<bos>{{ messages[0].content }}", False), ("{{ messages }}", True)]
)
async def test_bos_is_not_doubled(template: str, adds_bos: bool) -> None:
    head = ShardServer(chat_template=template)
    async with mesh(head) as (generations, _):
        await run(generations, request(ChatPrompt([{"role": "user", "content": "hi"}])))
    assert (head.tokenized[0].add_special, head.tokenized[0].parse_special) == (adds_bos, True)


async def test_a_model_without_template_refuses_chat_and_completes() -> None:
    head = ShardServer(chat_template="")
    async with mesh(head) as (generations, _):
        with pytest.raises(BadParameter, match=r"no chat template.*/v1/completions"):
            await run(generations, request(ChatPrompt([{"role": "user", "content": "hi"}])))
        assert (await run(generations)).generated_tokens == 4


@pytest.mark.parametrize(
    ("step", "kind", "reason"),
    [
        (
            failed(pb.REFUSAL_PEER_LOST, "reset", hop_index=1, shard_id="tail"),
            HopLost,
            r"hop 1 \(tail\), layers 4:8, was lost",
        ),
        (failed(pb.REFUSAL_ENGINE_FAILURE, "NaN", hop_index=1, shard_id="tail"), HopRefused, r"hop 1 \(tail\).*NaN"),
        (failed(pb.REFUSAL_PEER_LOST, "?", hop_index=9, shard_id="x"), HopLost, r"hop 0 \(head\)"),
        (Broken.UNAVAILABLE, HopLost, r"hop 0 \(head\) was lost"),
        (Broken.OK_WITHOUT_END, HopLost, r"hop 0 \(head\) ended its stream without saying why"),
        (pb.GenerateEvent(finished=pb.Finished(cause=pb.FINISH_UNSPECIFIED)), HopLost, "unknown cause"),
    ],
)
async def test_a_broken_hop_is_named(step: object, kind: type[MeshnetError], reason: str) -> None:
    head, tail = halves(script=[b"a", step])
    async with mesh(head, tail) as (generations, routes):
        generation = None
        with pytest.raises(kind, match=reason):
            async with generations.start(request()) as generation:
                await pieces(generation)
        assert generation is not None
        assert generation.telemetry.finish_cause == FinishCause.FAILED
        assert generation.telemetry.generated_tokens == 1
    assert routes.ends[0][1:] == (FinishCause.FAILED, 1)


async def test_a_head_that_says_too_much() -> None:
    """The answer is what was asked for, whatever comes after it."""
    script = [pb.GenerateEvent(token=pb.GeneratedToken(piece=b"x", position=3 + n)) for n in range(20)]
    async with mesh(ShardServer(script=script)) as (generations, _):
        async with generations.start(request(answer_tokens=5)) as generation:
            assert await pieces(generation) == [b"x"] * 5
        assert generation.telemetry.finish_cause == FinishCause.LENGTH


async def test_a_head_whose_tokens_are_out_of_place() -> None:
    script = [pb.GenerateEvent(token=pb.GeneratedToken(piece=b"x", position=7))]
    async with mesh(ShardServer(script=script)) as (generations, _):
        with pytest.raises(HopLost, match="a token for position 7, not 3"):
            async with generations.start(request()) as generation:
                await pieces(generation)


async def test_a_silent_head_is_lost() -> None:
    head = ShardServer(script=[b"a", asyncio.Event()])
    async with mesh(head, step_timeout_s=0.1, step_grace_s=0.1) as (generations, _):
        with pytest.raises(HopLost, match=r"sent nothing for 0\.2 s"):
            async with generations.start(request()) as generation:
                await pieces(generation)
    assert head.generated[0].step_timeout_ms == 100


async def test_prefill_progress_shows_that_the_head_is_alive() -> None:
    alive = [pb.GenerateEvent(prefill=pb.PrefillProgress(done_tokens=n, total_tokens=9)) for n in range(9)]
    async with mesh(ShardServer(script=[*alive, b"a"])) as (generations, _):
        assert (await run(generations)).generated_tokens == 2


async def test_an_answer_has_a_deadline() -> None:
    async with mesh(ShardServer(script=[b"a", asyncio.Event()]), generation_deadline_s=0.3) as (generations, routes):
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.3 s"):
            async with generations.start(request()) as generation:
                await pieces(generation)
    assert routes.ends[0][1] == FinishCause.FAILED


async def test_a_lost_hop_is_missing_from_telemetry_and_does_not_hold_up_the_rest() -> None:
    gone = asyncio.Event()
    head, tail = halves(script=[b"a", gone, failed(pb.REFUSAL_PEER_LOST, "reset", hop_index=1, shard_id="tail")])
    async with mesh(head, tail) as (generations, _):

        async def lose_tail() -> Generation:
            async with generations.start(request()) as generation:
                started.append(generation)
                await generation.next_token()
                await tail.stop()
                tail.sessions.clear()
                gone.set()
                await pieces(generation)
            return generation

        started: list[Generation] = []
        with pytest.raises(HopLost):
            await lose_tail()
        [generation] = started
        assert generation.telemetry.missing_hops == ("tail",)
        assert [hop.shard for hop in generation.telemetry.hops] == ["head"]


async def test_a_tracker_that_fails_at_the_end_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(StaticRoutes):
        async def close_session(self, session_id: str, **end: Any) -> None:
            await super().close_session(session_id, **end)
            raise MeshnetError("the tracker is away")

    async with mesh(ShardServer(), routes=Forgetful(())) as (generations, _):
        async with generations.start(request()) as generation:
            await pieces(generation)
        await until(lambda: "the tracker is away" in caplog.text, "it is logged")


async def test_a_worker_that_serves_another_artifact_is_refused() -> None:
    head = ShardServer()
    async with mesh(head) as (generations, routes):
        routes.shards = [head.shard.model_copy(update={"artifact_digest": "sha256:other"})]
        with pytest.raises(HopRefused, match="another artifact"):
            async with generations.start(request()):
                pass


async def test_a_text_that_cannot_fit_is_refused_before_it_reaches_a_worker() -> None:
    """Tokenizing megabytes takes seconds, in which the head's vocabulary would serve nobody else."""
    head, tail = halves()
    async with mesh(head, tail) as (generations, _):
        limit = min(head.shard.session_capacity_tokens, head.shard.n_ctx_train)
        with pytest.raises(
            PromptTooLong, match=f"holds {limit} tokens, but the prompt has {limit * 256 + 1} bytes"
        ) as caught:
            await run(generations, request("x" * (limit * 256 + 1)))
        assert caught.value.param == "prompt"
        assert caught.value.requested_tokens > caught.value.limit_tokens == limit
        assert head.tokenized == []
