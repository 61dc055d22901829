"""Sessions against a real SQLite file: tickets, balance, repair, leases, restart."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
from sqlalchemy import text

from meshnet.core import Continuation, FinishCause, RouteSession, RouteSource
from meshnet.errors import NoRoute, SessionLost, TrackerUnavailable, UnknownModel
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.messages import Departure, ShardLoad
from meshnet.tracker.overview import coverage
from meshnet.tracker.sessions import TIDY_S
from tests.support.session_mesh import ME, SETTINGS, SessionMesh, halves
from tests.support.shards import WORKER_KEY, advertise, make_shard


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SessionMesh]:
    database = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield SessionMesh(database)
    await database.close()


def test_sessions_are_a_route_source(mesh: SessionMesh) -> None:
    source: RouteSource = mesh.sessions
    assert source is mesh.sessions


async def test_every_hop_gets_a_ticket_signed_with_its_key(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    assert session.epoch == 1
    assert [shard.shard_id for shard in session.route.shards] == ["a", "b"]
    for shard, ticket in zip(session.route.shards, session.tickets, strict=True):
        assert (ticket.session_id, ticket.epoch) == (session.session_id, 1)
        assert ticket.expires_unix_s == 1_000_600
        signed = f"meshnet-ticket-v1\n{session.session_id}\n1\n{shard.shard_id}\n1000600"
        assert ticket.mac == hmac.new(bytes.fromhex(WORKER_KEY), signed.encode(), hashlib.sha256).hexdigest()
    (row,) = await mesh.rows()
    assert (row.session_id, row.state, row.epoch, row.closed_unix_s) == (session.session_id, "open", 1, None)
    assert await mesh.hops() == [(1, 0, "a", "n1", "0:3"), (1, 1, "b", "n1", "3:8")]


async def test_session_ids_are_random(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(slots=50))
    ids = {(await mesh.sessions.open_session("tiny")).session_id for _ in range(20)}
    assert len(ids) == 20


async def test_closing_frees_the_slots_once(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    first = await mesh.sessions.open_session("tiny")
    await mesh.sessions.open_session("tiny")
    assert mesh.sessions.open_on("a") == 2
    for cause, tokens in ((FinishCause.EOG, 7), (FinishCause.FAILED, 9)):
        await mesh.sessions.close_session(first.session_id, finish_cause=cause, generated_tokens=tokens)
    await mesh.sessions.close_session("0" * 32, finish_cause=FinishCause.EOG, generated_tokens=0)
    assert mesh.sessions.open_on("a") == 1
    closed = {row.session_id: row for row in await mesh.rows()}[first.session_id]
    assert (closed.finish_cause, closed.generated_tokens, closed.closed_unix_s) == ("eog", 7, 1_000_000)
    assert await mesh.sessions.count_closed() == 1


async def test_unknown_and_unserved_models_are_different_errors(mesh: SessionMesh) -> None:
    with pytest.raises(UnknownModel, match="no node has offered any model yet"):
        await mesh.sessions.open_session("tiny")
    await mesh.offer(*halves())
    with pytest.raises(UnknownModel, match="model 'huge' is not known; known models: tiny"):
        await mesh.sessions.open_session("huge")
    await mesh.offer(halves()[0])
    with pytest.raises(NoRoute, match="gap at layer 3: no ready shard holds layers 3:8"):
        await mesh.sessions.open_session("tiny")
    await mesh.registry.deregister("n1", Departure(lease_epoch=mesh.epoch, instance=ME))
    with pytest.raises(NoRoute, match="no ready shard holds any of its layers"):
        await mesh.sessions.open_session("tiny")


async def test_only_models_that_are_advertised_now_are_offered_for_an_unknown_name(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("c", "0:3", model="departing")))
    with pytest.raises(UnknownModel, match=r"known models: departing, tiny$"):
        await mesh.sessions.open_session("huge")
    await mesh.offer(*halves())
    with pytest.raises(UnknownModel, match=r"known models: tiny$"):
        await mesh.sessions.open_session("huge")
    # Its name is known all the same.
    with pytest.raises(NoRoute, match="no ready shard holds any of its layers; start a node that serves it"):
        await mesh.sessions.open_session("departing")
    await mesh.offer()
    with pytest.raises(UnknownModel, match="no node offers any model now"):
        await mesh.sessions.open_session("huge")


async def test_shards_that_are_not_ready_are_told_instead_of_advice(mesh: SessionMesh) -> None:
    mesh = SessionMesh(mesh.database, probing=True)
    await mesh.offer(*halves())
    with pytest.raises(NoRoute) as caught:
        await mesh.sessions.open_session("tiny")
    assert str(caught.value) == (
        "no route for tiny: no ready shard holds any of its layers; 2 shards are advertised but not ready "
        "(for example a: not probed yet)"
    )
    await mesh.registry.prove(["a"])
    address = halves()[1].shard.address
    await mesh.registry.doubt(["b"], f"cannot be reached at {address} from the tracker")
    with pytest.raises(NoRoute) as caught:
        await mesh.sessions.open_session("tiny")
    told = "gap at layer 3: no ready shard holds layers 3:8; 1 shard there is advertised but not ready (b: cannot be "
    assert str(caught.value) == f"no route for tiny: {told}reached from the tracker)"
    # Where machines are is told to operators only.
    (model,) = coverage(mesh.registry)
    assert model.reason == f"{told}reached at {address} from the tracker)"
    await mesh.registry.prove(["b"])
    session = await mesh.sessions.open_session("tiny")
    await mesh.registry.doubt(["b"], "its worker hangs")
    with pytest.raises(NoRoute, match=r"1 shard there is advertised but not ready \(b: its worker hangs\)$"):
        await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    # What waits for its lease to end is nothing to wait for.
    mesh.monotonic.now += SETTINGS.lease_ttl_s + 1
    with pytest.raises(NoRoute, match="start a node that serves it"):
        await mesh.sessions.open_session("tiny")


async def test_the_worker_alone_decides_that_it_is_full(mesh: SessionMesh) -> None:
    # A gateway that was killed leaves its sessions open here; the worker has freed their slots long ago.
    await mesh.offer(*halves(slots=2))
    for _ in range(5):
        await mesh.sessions.open_session("tiny")
    assert mesh.sessions.open_on("a") == 5


async def test_sessions_opened_at_once_spread_over_replicas(mesh: SessionMesh) -> None:
    replicas = [advertise(make_shard(f"b{n}", "3:8", slots=8)) for n in range(4)]
    await mesh.offer(advertise(make_shard("a", "0:3", slots=50)), *replicas)
    opened = await asyncio.gather(*(mesh.sessions.open_session("tiny") for _ in range(16)))
    used = Counter(session.route.shards[1].shard_id for session in opened)
    assert used == {"b0": 4, "b1": 4, "b2": 4, "b3": 4}


async def test_reported_load_moves_new_sessions_away(mesh: SessionMesh) -> None:
    await mesh.offer(
        advertise(make_shard("a", "0:3")),
        advertise(make_shard("b1", "3:8"), ShardLoad(open_sessions=3)),
        advertise(make_shard("b2", "3:8"), ShardLoad(open_sessions=1)),
    )
    session = await mesh.sessions.open_session("tiny")
    assert session.route.shards[1].shard_id == "b2"


async def test_sessions_that_nobody_closed_do_not_repel_new_ones(mesh: SessionMesh) -> None:
    first = advertise(make_shard("w1", "0:8"))
    second = advertise(make_shard("w2", "0:8"), ShardLoad(open_sessions=1))
    await mesh.offer(first, second)
    for _ in range(3):
        await mesh.sessions.open_session("tiny")
    # The workers report: w1 has freed all of its sessions, w2 has its one.
    await mesh.pass_s(50)
    session = await mesh.sessions.open_session("tiny")
    assert [shard.shard_id for shard in session.route.shards] == ["w1"]


async def test_a_draining_shard_gets_no_session(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w", "0:8"), ShardLoad(draining=True)))
    with pytest.raises(NoRoute):
        await mesh.sessions.open_session("tiny")
    assert await mesh.sessions.models() == []


async def test_avoided_shards_are_left_out(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["b"])
    assert [shard.shard_id for shard in session.route.shards] == ["a", "b2"]


async def test_the_size_of_a_request_counts(mesh: SessionMesh) -> None:
    small = advertise(make_shard("small", "0:8", capacity_tokens=100))
    large = advertise(make_shard("large", "0:8", capacity_tokens=1000), ShardLoad(open_sessions=3))
    await mesh.offer(small, large)
    session = await mesh.sessions.open_session("tiny", prompt_tokens=200, answer_tokens=50)
    assert session.route.shards[0].shard_id == "large"
    # A guess refuses nobody.
    await mesh.offer(small)
    session = await mesh.sessions.open_session("tiny", prompt_tokens=200)
    assert session.route.shards[0].shard_id == "small"


async def test_a_repair_keeps_the_survivors_and_raises_the_epoch(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("a2", "0:3")), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny")
    head, tail = (shard.shard_id for shard in session.route.shards)
    mesh.unix.now += 7
    repaired = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[tail])
    other = "b2" if tail == "b" else "b"
    assert [shard.shard_id for shard in repaired.route.shards] == [head, other]
    assert (repaired.session_id, repaired.epoch) == (session.session_id, 2)
    assert {(ticket.epoch, ticket.expires_unix_s) for ticket in repaired.tickets} == {(2, 1_000_607)}
    assert (mesh.sessions.open_on(head), mesh.sessions.open_on(tail), mesh.sessions.open_on(other)) == (1, 0, 1)
    (row,) = await mesh.rows()
    assert (row.state, row.epoch, row.expires_unix_s) == ("open", 2, 1_000_607)
    assert [hop[:3] for hop in await mesh.hops()] == [(1, 0, head), (1, 1, tail), (2, 0, head), (2, 1, other)]


async def test_a_repair_that_finds_no_route_can_be_tried_again(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    missed: list[Collection[str]] = []
    mesh.sessions.unrepairable = missed.append
    for _ in range(2):
        with pytest.raises(NoRoute, match=r"leaving out b, .*no ready shard holds layers 3:8"):
            await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    # Whoever could find a replacement hears of it each time.
    assert missed == [["b"], ["b"]]
    await mesh.offer(*halves(), advertise(make_shard("spare", "3:8")))
    repaired = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    assert [shard.shard_id for shard in repaired.route.shards] == ["a", "spare"]


async def test_a_repair_never_changes_the_model_file(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w", "0:8")))
    session = await mesh.sessions.open_session("tiny")
    await mesh.offer(advertise(make_shard("w", "0:8")), advertise(make_shard("v", "0:8", artifact="sha256:bb")))
    with pytest.raises(NoRoute):
        await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["w"])


async def test_an_answer_goes_on_where_the_same_is_computed_in_the_same_steps(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w", "0:8")))
    session = await mesh.sessions.open_session("tiny")
    continuing = Continuation.of(session.route)
    steps = session.route.shards[0].max_step_tokens
    unlike = [make_shard("v", "0:8", build="build-2"), make_shard("u", "0:8", artifact="sha256:bb")]
    for name, tokens in (("s", steps // 2), ("t", 2 * steps)):
        unlike.append(make_shard(name, "0:8").model_copy(update={"max_step_tokens": tokens}))
    await mesh.offer(*map(advertise, unlike))
    for _ in range(2):
        with pytest.raises(NoRoute, match="ready shards of that name compute something else"):
            await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["w"], continuing=continuing)
        with pytest.raises(NoRoute, match="ready shards of that name compute something else"):
            await mesh.sessions.open_session("tiny", continuing=continuing)
    await mesh.offer(*map(advertise, [*unlike, make_shard("like", "0:8")]))
    repaired = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["w"], continuing=continuing)
    assert [shard.shard_id for shard in repaired.route.shards] == ["like"]
    opened = await mesh.sessions.open_session("tiny", continuing=continuing)
    assert [shard.shard_id for shard in opened.route.shards] == ["like"]


async def test_a_part_of_a_shard_survives_beside_steps_of_another_size(mesh: SessionMesh) -> None:
    head, spare = make_shard("a", "0:3"), make_shard("a2", "0:3")
    tail = make_shard("b", "1:8", cuts=[3]).model_copy(update={"max_step_tokens": 2 * head.max_step_tokens})
    await mesh.offer(advertise(head), advertise(tail))
    session = await mesh.sessions.open_session("tiny")
    await mesh.offer(advertise(tail), advertise(spare))
    repaired = await mesh.sessions.repair_session(
        session.session_id, epoch=1, lost_shards=["a"], continuing=Continuation.of(session.route)
    )
    assert [(shard.shard_id, str(shard.layers)) for shard in repaired.route.shards] == [("a2", "0:3"), ("b", "3:8")]


async def test_a_repair_needs_the_last_epoch_of_an_open_session(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    with pytest.raises(SessionLost, match="does not know"):
        await mesh.sessions.repair_session("0" * 32, epoch=1, lost_shards=[])
    session = await mesh.sessions.open_session("tiny")
    with pytest.raises(SessionLost, match="its last one is 1"):
        await mesh.sessions.repair_session(session.session_id, epoch=2, lost_shards=[])
    await mesh.sessions.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    with pytest.raises(SessionLost, match="closed"):
        await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[])


async def test_of_two_repairs_of_one_epoch_one_wins(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")), advertise(make_shard("b3", "3:8")))
    session = await mesh.sessions.open_session("tiny")
    lost = session.route.shards[1].shard_id
    outcomes = await asyncio.gather(
        *(mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[lost]) for _ in range(3)),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["RouteSession", "SessionLost", "SessionLost"]
    assert [hop[0] for hop in await mesh.hops()] == [1, 1, 2, 2]


async def test_a_session_closed_while_it_is_repaired_gets_no_tickets(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny")
    async with mesh.database.writing():
        repairing = asyncio.create_task(
            mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[session.route.shards[1].shard_id])
        )
        await asyncio.sleep(0)  # it has begun, and waits for the database
        closing = asyncio.create_task(
            mesh.sessions.close_session(session.session_id, finish_cause=FinishCause.FAILED, generated_tokens=0)
        )
        await asyncio.sleep(0)
    await closing
    with pytest.raises(SessionLost, match="while it was repaired"):
        await repairing
    assert mesh.sessions.n_open == 0
    assert [row.state for row in await mesh.rows()] == ["closed"]


async def test_tickets_of_an_epoch_are_made_once(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny")
    async with mesh.database.writing():  # both have to wait for the database
        repairs = [
            # The second guesses the epoch that the first is about to get.
            asyncio.create_task(mesh.sessions.repair_session(session.session_id, epoch=epoch, lost_shards=[]))
            for epoch in (1, 2)
        ]
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*repairs, return_exceptions=True)
    assert isinstance(outcomes[0], SessionLost)
    assert isinstance(outcomes[1], RouteSession)
    assert (outcomes[1].epoch, {ticket.epoch for ticket in outcomes[1].tickets}) == (3, {3})
    assert [hop[0] for hop in await mesh.hops()] == [1, 1, 2, 2, 3, 3]


async def test_only_the_gateway_of_a_session_makes_shards_suspect(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w1", "0:8", slots=100)), advertise(make_shard("w2", "0:8", slots=1)))
    session = await mesh.sessions.open_session("tiny")
    for session_id, epoch in (("0" * 32, 1), (session.session_id, 7)):
        with pytest.raises(SessionLost):
            await mesh.sessions.repair_session(session_id, epoch=epoch, lost_shards=["w1"])
    used = {(await mesh.sessions.open_session("tiny")).route.shards[0].shard_id for _ in range(3)}
    assert "w1" in used


async def test_a_lost_shard_is_suspect_for_a_while_to_all(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w1", "0:8", slots=100)), advertise(make_shard("w2", "0:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["w2"])
    await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["w1"])
    for _ in range(3):
        # Though w2 gets busier each time.
        assert (await mesh.sessions.open_session("tiny")).route.shards[0].shard_id == "w2"
    # No other choice: better than nothing.
    assert (await mesh.sessions.open_session("tiny", avoid_shards=["w2"])).route.shards[0].shard_id == "w1"
    await mesh.pass_s(5)
    # It hung, and goes on under the same id.
    used = {(await mesh.sessions.open_session("tiny")).route.shards[0].shard_id for _ in range(4)}
    assert "w1" in used


async def test_a_lost_shard_that_came_back_may_serve_the_same_session_again(mesh: SessionMesh) -> None:
    await mesh.offer(advertise(make_shard("w1", "0:8")), advertise(make_shard("w2", "0:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["w2"])
    second = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["w1"])
    third = await mesh.sessions.repair_session(session.session_id, epoch=second.epoch, lost_shards=["w2"])
    assert (third.epoch, third.route.shards[0].shard_id) == (3, "w1")


async def test_sessions_nobody_renews_are_orphans(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    wanted = await mesh.sessions.open_session("tiny")
    orphan = await mesh.sessions.open_session("tiny")
    for _ in range(4):
        await mesh.pass_s(15)
        assert await mesh.sessions.renew_sessions([wanted.session_id, "0" * 32]) == ("0" * 32,)
    assert await mesh.sessions.expire() == (orphan.session_id,)
    assert await mesh.sessions.renew_sessions([wanted.session_id, orphan.session_id]) == (orphan.session_id,)
    assert (mesh.sessions.n_open, mesh.sessions.open_on("a")) == (1, 1)
    states = {row.session_id: (row.state, row.closed_unix_s) for row in await mesh.rows()}
    assert states == {wanted.session_id: ("open", None), orphan.session_id: ("orphaned", 1_000_060)}


async def test_sessions_end_with_their_tickets(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    mesh.unix.now += 599
    assert await mesh.sessions.renew_sessions([session.session_id]) == ()
    assert await mesh.sessions.expire() == ()
    mesh.unix.now += 1
    # Even before anybody has looked.
    assert await mesh.sessions.renew_sessions([session.session_id]) == (session.session_id,)
    with pytest.raises(SessionLost, match="run out"):
        await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[])
    assert await mesh.sessions.expire() == (session.session_id,)
    assert mesh.sessions.n_open == 0
    (row,) = await mesh.rows()
    assert (row.state, row.finish_cause, row.closed_unix_s) == ("expired", None, 1_000_600)


async def test_closed_sessions_and_their_hops_are_forgotten_in_time(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    await mesh.sessions.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    mesh.unix.now += 5999
    await mesh.sessions.expire()
    assert (len(await mesh.rows()), len(await mesh.hops())) == (1, 2)
    mesh.unix.now += 1
    mesh.monotonic.now += TIDY_S
    await mesh.sessions.expire()
    assert (await mesh.rows(), await mesh.hops()) == ([], [])


async def test_a_restart_keeps_open_sessions(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["b2"])
    closed = await mesh.sessions.open_session("tiny", avoid_shards=["b2"])
    await mesh.sessions.close_session(closed.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    again = await mesh.restarted()
    assert (again.sessions.n_open, again.sessions.open_on("b")) == (1, 1)
    assert await again.sessions.renew_sessions([session.session_id, closed.session_id]) == (closed.session_id,)
    repaired = await again.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    assert [shard.shard_id for shard in repaired.route.shards] == ["a", "b2"]
    once_more = await mesh.restarted()
    assert (once_more.sessions.open_on("b"), once_more.sessions.open_on("b2")) == (0, 1)
    await once_more.sessions.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    assert once_more.sessions.n_open == 0


async def test_a_repair_whose_answer_was_lost_with_the_tracker_is_asked_for_again(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["b2"])
    await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    again = await mesh.restarted()
    with pytest.raises(SessionLost):
        await again.sessions.repair_session(session.session_id, epoch=0, lost_shards=["b"])
    repaired = await again.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    assert (repaired.epoch, [shard.shard_id for shard in repaired.route.shards]) == (3, ["a", "b2"])
    # Now the tracker knows.
    with pytest.raises(SessionLost):
        await again.sessions.repair_session(session.session_id, epoch=2, lost_shards=["b2"])


async def test_after_a_restart_every_session_has_a_whole_lease(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    mesh.monotonic.now += 59
    again = await mesh.restarted()
    again.monotonic.now += 59
    assert await again.sessions.expire() == ()
    again.monotonic.now += 1
    assert await again.sessions.expire() == (session.session_id,)


async def test_a_failing_database_hands_out_no_ticket_and_changes_nothing(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    session = await mesh.sessions.open_session("tiny")
    head, tail = (shard.shard_id for shard in session.route.shards)

    async def run(statement: str) -> None:
        async with mesh.database.writing() as writer:
            await writer.execute(text(statement))

    await run("CREATE TRIGGER full_disk BEFORE INSERT ON session_hops BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    with pytest.raises(TrackerUnavailable, match="disk full"):
        await mesh.sessions.open_session("tiny")
    with pytest.raises(TrackerUnavailable, match="disk full"):
        await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[tail])
    assert (mesh.sessions.n_open, mesh.sessions.open_on(tail)) == (1, 1)
    await run("DROP TRIGGER full_disk")
    repaired = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=[tail])
    assert (repaired.epoch, repaired.route.shards[0].shard_id) == (2, head)
    assert len(await mesh.rows()) == 1


async def test_orphans_are_recorded_once_the_database_works_again(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    await mesh.sessions.open_session("tiny")
    async with mesh.database.writing() as writer:
        await writer.execute(
            text("CREATE TRIGGER full BEFORE UPDATE ON sessions BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        )
    mesh.monotonic.now += 60
    with pytest.raises(TrackerUnavailable):
        await mesh.sessions.expire()
    assert mesh.sessions.n_open == 0
    async with mesh.database.writing() as writer:
        await writer.execute(text("DROP TRIGGER full"))
    await mesh.sessions.expire()
    assert [row.state for row in await mesh.rows()] == ["orphaned"]


async def test_a_caller_that_goes_away_while_a_session_opens_leaves_an_orphan(mesh: SessionMesh) -> None:
    await mesh.offer(*halves())
    async with mesh.database.writing():
        opening = asyncio.create_task(mesh.sessions.open_session("tiny"))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
    assert opening.cancelled()
    await mesh.sessions.finish()
    assert [row.state for row in await mesh.rows()] == ["open"]
    mesh.monotonic.now += 60
    assert len(await mesh.sessions.expire()) == 1
    assert [row.state for row in await mesh.rows()] == ["orphaned"]


async def test_served_models_tell_the_capacity_of_their_route(mesh: SessionMesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("other", "0:3", model="partial")))
    (served,) = await mesh.sessions.models()
    assert (served.model, served.artifact_digest, served.session_capacity_tokens) == ("tiny", "sha256:aa", 512)
    assert served.created_unix_s > 1_600_000_000
