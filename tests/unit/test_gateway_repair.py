"""Repair of a route in the middle of an answer. Workers are real servers with written-down answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshnet.core import FinishCause, RouteSession
from meshnet.errors import HopLost, HopRefused, SessionLost, TrackerUnavailable, UnknownModel
from meshnet.gateway.generation import Generation
from meshnet.rpc.generated import shard_pb2 as pb
from tests.support.gateway_server import until
from tests.support.shard_server import Broken, ShardServer, failed
from tests.support.static_routes import StaticRoutes
from tests.unit.test_gateway_app import api, events
from tests.unit.test_gateway_generation import FULL, mesh, pieces, request, run

PROMPT = [256, *b"Hi"]


def tail_lost(reason: str = "reset") -> pb.GenerateEvent:
    return failed(pb.REFUSAL_PEER_LOST, reason, hop_index=1, shard_id="tail")


def thirds(*first_scripts: Any, script: Any = (b"l", b"o")) -> list[ShardServer]:
    """A head that says ``first_scripts``, a tail, and a spare for each."""
    return [
        ShardServer(shard_id="head", layers=(0, 4), first_scripts=list(first_scripts), script=script),
        ShardServer(shard_id="tail", layers=(4, 8)),
        ShardServer(shard_id="spare-head", layers=(0, 4), script=script),
        ShardServer(shard_id="spare-tail", layers=(4, 8)),
    ]


async def test_a_lost_tail_is_replaced_and_the_answer_goes_on() -> None:
    head, tail, spare_head, spare_tail = thirds([b"h", b"e", b"l", tail_lost()])
    async with mesh(head, tail, spare_head, spare_tail) as (generations, routes):
        async with generations.start(request(seed=5)) as generation:
            assert await pieces(generation) == [b"h", b"e", b"l", b"l", b"o", b""]
            tail.sessions.clear()
        telemetry = generation.telemetry
        [repair] = telemetry.repairs
        assert (repair.epoch, repair.cause, repair.hop) == (2, "hop_lost", "tail")
        assert [replacement.shard for replacement in repair.replacements] == ["spare-tail"]
        # 8 layers x (3 prompt tokens and 3 generated ones).
        assert (repair.layer_tokens, repair.kept_layer_tokens) == (48, 0)
        assert min(repair.detect_ms, repair.plan_ms, repair.open_ms, repair.refill_ms or 0) > 0
        assert (telemetry.epoch, telemetry.generated_tokens, telemetry.finish_cause) == (2, 6, FinishCause.EOG)
        assert [hop.shard for hop in telemetry.hops] == ["head", "spare-tail"]
        # Two epochs of the head together; the tail was closed like everybody else.
        assert telemetry.hops[0].compute_ms == 5.0
        assert routes.repaired == [("tail",)]
        await until(lambda: bool(routes.ends), "the end is recorded")
    again = head.generated[1]
    assert list(again.tokens) == [*PROMPT, *b"hel"]
    assert (again.cached_tokens, again.replayed_tokens, list(again.resume_at)) == (0, 3, [0, 0])
    assert again.max_new_tokens == 16 - 3
    assert again.sampling == head.generated[0].sampling
    assert again.chunk_tokens == head.generated[0].chunk_tokens == 32
    assert [(each.ticket.epoch, each.token_capacity) for each in head.opened] == [(1, 19), (2, 19)]
    assert spare_tail.opened[0].ticket.epoch == 2
    rows = {(row.epoch, row.hop_index): (row.shard_id, row.measured) for row in routes.work}
    assert rows[1, 0] == ("head", True)
    assert rows[2, 0] == ("head", True)
    assert rows[2, 1] == ("spare-tail", True)
    assert rows[1, 1][0] == "tail"


async def test_hops_behind_the_lost_one_keep_what_they_hold() -> None:
    head, tail, spare_head, spare_tail = thirds([b"h", b"e", Broken.UNAVAILABLE])
    async with mesh(head, tail, spare_head, spare_tail) as (generations, _):
        async with generations.start(request()) as generation:
            await generation.next_token()
            await generation.next_token()
            [session] = tail.sessions
            tail.held_tokens[session] = [*PROMPT, *b"h"]
            assert await pieces(generation) == [b"l", b"o", b""]
            head.sessions.clear()
        [repair] = generation.telemetry.repairs
        assert repair.hop == "head"
        assert (repair.layer_tokens, repair.kept_layer_tokens) == (4 * 5 + 4 * 1, 4 * 4)
    [again] = spare_head.generated
    assert (again.cached_tokens, list(again.resume_at)) == (0, [0, 4])
    assert list(again.tokens) == [*PROMPT, *b"he"]


async def test_a_hop_that_holds_something_else_starts_over() -> None:
    head, tail, spare_head, spare_tail = thirds([b"h", Broken.UNAVAILABLE])
    async with (
        mesh(head, tail, spare_head, spare_tail) as (generations, _),
        generations.start(request()) as generation,
    ):
        await generation.next_token()
        [session] = tail.sessions
        tail.held_tokens[session] = [1, 2, 3]
        await pieces(generation)
        head.sessions.clear()
    assert list(spare_head.generated[0].resume_at) == [0, 0]


async def test_the_last_token_needs_no_repair() -> None:
    """The route breaks after the last token, before the head could say that it was the last."""
    head, tail, *_ = thirds([b"h", b"e", tail_lost()])
    async with mesh(head, tail) as (generations, routes):
        generation = await run(generations, request(answer_tokens=2))
        assert generation.telemetry.finish_cause == FinishCause.LENGTH
        assert generation.telemetry.repairs == ()
    assert routes.repaired == []
    end = pb.GenerateEvent(token=pb.GeneratedToken(position=4, token=257, is_eog=True))
    head, tail, *_ = thirds([b"h", end, Broken.UNAVAILABLE])
    async with mesh(head, tail) as (generations, routes):
        assert (await run(generations)).telemetry.finish_cause == FinishCause.EOG
    assert routes.repaired == []


async def test_a_spare_that_comes_late_is_waited_for_and_survivors_are_touched() -> None:
    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_tail, repair_timeout_s=20.0, touch_s=0.05) as (generations, routes):
        late = [server.shard for server in (head, tail, spare_tail)]
        routes.shards = late[:2]
        async with generations.start(request()) as generation:
            await generation.next_token()
            waiting = asyncio.create_task(pieces(generation))
            await until(lambda: len(head.touched) >= 2, "the head is touched")
            routes.shards = late
            assert await waiting == [b"l", b"o", b""]
        assert tail.touched == []
        assert len(routes.repaired) > 2


async def test_without_any_other_route_the_answer_breaks_off() -> None:
    head, tail, *_ = thirds([b"h", tail_lost()])
    async with mesh(head, tail, repair_timeout_s=0.2) as (generations, routes):
        generation = None
        with pytest.raises(HopLost, match=r"hop 1 \(tail\).*was lost, and no other route was found") as caught:
            async with generations.start(request()) as generation:
                await pieces(generation)
        assert caught.value.shard_id == "tail"
        assert generation is not None
        assert generation.telemetry.finish_cause == FinishCause.FAILED
    assert [end[1] for end in routes.ends] == [FinishCause.FAILED]


async def test_repair_can_be_turned_off() -> None:
    head, tail, spare_tail, *_ = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_tail, repair_timeout_s=0) as (generations, routes):
        with pytest.raises(HopLost, match=r"hop 1 \(tail\)") as caught:
            async with generations.start(request()) as generation:
                await pieces(generation)
        assert "no other route" not in str(caught.value)
    assert routes.repaired == []


async def test_repairs_are_bounded() -> None:
    servers = [
        ShardServer(
            shard_id=f"s{index}", script=[b"a", failed(pb.REFUSAL_ENGINE_FAILURE, "NaN", hop_index=0, shard_id="")]
        )
        for index in range(6)
    ]
    async with mesh(*servers, repair_attempts=3) as (generations, _):
        generation: Generation | None = None
        with pytest.raises(HopRefused, match="NaN"):
            async with generations.start(request()) as generation:
                await pieces(generation)
        assert generation is not None
        assert len(generation.telemetry.repairs) == 3
        assert generation.telemetry.generated_tokens == 4


async def test_a_hop_whose_cache_was_wrong_gets_one_more_chance() -> None:
    mismatch = failed(pb.REFUSAL_PREFIX_MISMATCH, "other tokens", hop_index=1, shard_id="tail")
    head, tail, _, spare_tail = thirds([b"h", mismatch], [b"e", mismatch])
    async with mesh(head, tail, spare_tail) as (generations, routes):
        async with generations.start(request()) as generation:
            assert await pieces(generation) == [b"h", b"e", b"l", b"o", b""]
        assert [repair.cause for repair in generation.telemetry.repairs] == ["REFUSAL_PREFIX_MISMATCH"] * 2
    assert routes.repaired == [(), ("tail",)]


async def test_a_spare_that_is_full_or_gone_leads_to_the_next() -> None:
    head, tail, gone, full = thirds([b"h", tail_lost()])
    gone.layers = (4, 8)
    gone.shard_id, full.shard_id = "gone", "full"
    full.open_refusal = FULL
    good = ShardServer(shard_id="good", layers=(4, 8))
    async with mesh(head, tail, gone, full, good) as (generations, _):
        async with generations.start(request()) as generation:
            await generation.next_token()
            await gone.stop()
            await pieces(generation)
        assert [hop.shard for hop in generation.telemetry.hops] == ["head", "good"]
        assert len(generation.telemetry.repairs) == 1


async def test_a_tracker_that_is_away_is_asked_again() -> None:
    class Away(StaticRoutes):
        n_asked = 0

        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            self.n_asked += 1
            if self.n_asked < 4:
                raise TrackerUnavailable("no answer")
            return await super().repair_session(session_id, **wanted)

    head, tail, spare_head, spare_tail = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_head, spare_tail, routes=Away(()), repair_timeout_s=20.0) as (generations, _):
        assert (await run(generations)).telemetry.epoch == 2


async def test_a_tracker_that_forgot_the_session_opens_another() -> None:
    class Forgetful(StaticRoutes):
        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            self.open_sessions.discard(session_id)
            raise SessionLost("never heard of it")

    head, tail, spare_head, spare_tail = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_head, spare_tail, routes=Forgetful(())) as (generations, routes):
        async with generations.start(request()) as generation:
            assert await pieces(generation) == [b"h", b"l", b"o", b""]
        assert generation.telemetry.epoch == 1
        assert len(generation.telemetry.repairs) == 1
        # Both of the head's sessions were closed, and each session's end has its own work.
        assert len(head.closed) == 2
        await until(lambda: len(routes.ends) == 2, "both ends are recorded")
        assert [(end[1], end[2]) for end in routes.ends] == [(FinishCause.FAILED, 1), (FinishCause.EOG, 3)]
        assert [(row.epoch, row.shard_id) for row in routes.work] == [
            (1, "head"),
            (1, "tail"),
            (1, "head"),
            (1, "spare-tail"),
        ]


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("unlike", [{"artifact_digest": "sha256:other"}, {"compatibility_id": "other"}])
async def test_no_answer_goes_on_with_something_else(unlike: dict[str, Any], forgets: bool) -> None:
    class Careless(StaticRoutes):
        """Names shards by their model's name alone."""

        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            if forgets:
                raise SessionLost("never heard of it")
            return await super().repair_session(session_id, **wanted)

    gone = failed(pb.REFUSAL_PEER_LOST, "gone", hop_index=0, shard_id="whole")
    whole = ShardServer(shard_id="whole", script=[b"h", gone])
    other = ShardServer(shard_id="other", script=[b"x"], **unlike)
    async with mesh(whole, routes=Careless(()), repair_timeout_s=0.3) as (generations, routes):
        async with other, generations.start(request()) as generation:
            assert (await generation.next_token()) is not None
            routes.shards = (*routes.shards, other.shard)
            with pytest.raises(HopLost, match="no other route was found"):
                await pieces(generation)
        assert not other.opened


@pytest.mark.parametrize("max_step_tokens", [16, 128])
async def test_steps_of_a_repaired_route_are_of_the_same_size(max_step_tokens: int) -> None:
    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    spare_tail.max_step_tokens = max_step_tokens
    async with mesh(head, tail, spare_tail, repair_timeout_s=0.3) as (generations, _):
        with pytest.raises(HopLost, match="no other route was found"):
            await run(generations)
        assert not spare_tail.opened


async def test_slots_of_a_session_that_the_tracker_forgot_are_free_before_the_next_is_opened() -> None:
    class Forgetful(StaticRoutes):
        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            self.open_sessions.discard(session_id)
            raise SessionLost("never heard of it")

        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            assert not head.sessions
            return await super().open_session(model, **wanted)

    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_tail, routes=Forgetful(())) as (generations, _):
        assert len((await run(generations)).telemetry.repairs) == 1


async def test_a_tracker_that_forgot_the_model_is_asked_again() -> None:
    class Empty(StaticRoutes):
        n_asked = 0

        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            raise SessionLost("never heard of it")

        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            self.n_asked += 1
            if 1 < self.n_asked < 4:
                raise UnknownModel("no node has offered any model yet")
            return await super().open_session(model, **wanted)

    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    async with mesh(head, tail, spare_tail, routes=Empty(()), repair_timeout_s=20.0) as (generations, _):
        assert len((await run(generations)).telemetry.repairs) == 1


async def test_sessions_are_renewed_often_enough_for_their_lease() -> None:
    gate = asyncio.Event()
    async with (
        mesh(ShardServer(script=[b"a", gate]), routes=StaticRoutes((), lease_s=0.3)) as (generations, routes),
        generations.start(request()) as generation,
    ):
        await generation.next_token()
        await until(lambda: len(routes.renewed) >= 3, "renewed")
        gate.set()
        await pieces(generation)


async def test_sessions_are_renewed_while_they_run() -> None:
    gate = asyncio.Event()
    async with (
        mesh(ShardServer(script=[b"a", gate]), renew_s=0.02) as (generations, routes),
        generations.start(request()) as generation,
    ):
        await generation.next_token()
        await until(lambda: len(routes.renewed) >= 3, "renewed")
        assert routes.renewed[0] == (generation.session_id,)
        gate.set()
        await pieces(generation)


async def test_what_hops_did_is_told_to_a_tracker_that_was_away() -> None:
    class Away(StaticRoutes):
        n_refused = 0

        async def close_session(self, session_id: str, **end: Any) -> None:
            if self.n_refused < 3:
                self.n_refused += 1
                raise TrackerUnavailable("no answer")
            await super().close_session(session_id, **end)

    head, tail = ShardServer(shard_id="head", layers=(0, 4)), ShardServer(shard_id="tail", layers=(4, 8))
    async with mesh(head, tail, routes=Away(()), end_retry_s=0.02) as (generations, routes):
        await run(generations)
        await run(generations)
        await until(lambda: len(routes.ends) == 2, "both ends are recorded")
    assert [(row.shard_id, row.epoch, row.prefill_tokens, row.decode_tokens) for row in routes.work] == [
        ("head", 1, 5, 6),
        ("tail", 1, 5, 6),
    ] * 2


async def test_a_client_hears_of_a_repair_that_takes_long() -> None:
    gate = asyncio.Event()
    head, tail, _, spare_tail = thirds([b"h", tail_lost()], script=[gate, b"i"])
    async with api(head, tail, spare_tail, keepalive_s=0.05, repair_timeout_s=20.0) as gateway:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        text = ""
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if text.count(": keep-alive") >= 2:
                    gate.set()
    *chunks, done = events(text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hi"
    assert chunks[-1]["meshnet"]["repairs"][0]["hop"] == "tail"


async def test_a_client_that_leaves_during_a_repair_leaves_nothing_behind() -> None:
    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    spare_tail.open_gate = asyncio.Event()
    async with mesh(head, tail, spare_tail, repair_timeout_s=20.0) as (generations, _):

        async def talk() -> None:
            async with generations.start(request()) as generation:
                await pieces(generation)

        task = asyncio.create_task(talk())
        # The head is open with the new epoch, the spare is still at it.
        await until(lambda: len(head.opened) == 2, "the repair opens the head again")
        task.cancel()
        spare_tail.open_gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not head.sessions and not spare_tail.sessions, "everybody has freed the session")


async def test_an_answer_that_cannot_be_repaired_leaves_nothing_behind() -> None:
    """The head was opened again, with an epoch that only the failed repair knows."""
    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    spare_tail.open_refusal = FULL
    async with mesh(head, tail, spare_tail, repair_timeout_s=0.2) as (generations, _):
        with pytest.raises(HopLost, match="no other route was found"):
            await run(generations)
        assert len(head.opened) > 1
        await until(lambda: not head.sessions and not tail.sessions, "everybody has freed the session")


async def test_a_hop_that_did_not_hear_of_the_end_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnet.gateway.hops.LATE_CLOSES_S", (0.02, 0.02, 0.02))
    head, tail = ShardServer(shard_id="head", layers=(0, 4)), ShardServer(shard_id="tail", layers=(4, 8))
    tail.deaf_closes = 2
    async with mesh(head, tail, close_timeout_s=0.1) as (generations, _):
        assert (await run(generations)).telemetry.missing_hops == ("tail",)
        await until(lambda: not tail.sessions, "the tail has freed the session")


async def test_a_session_opened_for_a_repair_that_fails_is_ended() -> None:
    class Forgetful(StaticRoutes):
        async def repair_session(self, session_id: str, **wanted: Any) -> RouteSession:
            self.open_sessions.discard(session_id)
            raise SessionLost("never heard of it")

    head, tail, _, spare_tail = thirds([b"h", tail_lost()])
    spare_tail.open_refusal = FULL
    async with mesh(head, tail, spare_tail, routes=Forgetful(()), repair_timeout_s=0.2) as (generations, routes):
        with pytest.raises(HopLost):
            await run(generations)
        await until(lambda: not routes.open_sessions, "every session is ended")
        assert {end[1] for end in routes.ends} == {FinishCause.FAILED}
