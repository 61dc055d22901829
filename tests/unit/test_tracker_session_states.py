"""Every transition of the state table, walked by a real tracker; the page about it says the same."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from pathlib import Path

import pytest

from meshnet.core import FinishCause
from meshnet.errors import SessionLost
from meshnet.gateway.settings import GatewaySettings
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.session_states import TRANSITIONS, SessionEvent, SessionState, after
from meshnet.tracker.sessions import TIDY_S
from meshnet.tracker.settings import TrackerSettings
from tests.support.session_mesh import SETTINGS, SessionMesh, halves
from tests.support.shards import advertise, make_shard

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sessions.md").read_text()


class Walk:
    """One session, led from state to state."""

    def __init__(self, mesh: SessionMesh) -> None:
        self.mesh = mesh
        self.session_id = "0" * 32
        self.epoch = 0

    async def opened(self) -> None:
        self.session_id = (await self.mesh.sessions.open_session("tiny", avoid_shards=["b2"])).session_id
        self.epoch = 1

    async def renewed(self) -> None:
        self.mesh.monotonic.now += SETTINGS.session_lease_s - 1
        assert await self.mesh.sessions.renew_sessions([self.session_id]) == ()
        # It lives as long again.
        self.mesh.monotonic.now += SETTINGS.session_lease_s - 1
        assert await self.mesh.sessions.expire() == ()

    async def repaired(self) -> None:
        repaired = await self.mesh.sessions.repair_session(self.session_id, epoch=self.epoch, lost_shards=["b"])
        assert repaired.epoch == self.epoch + 1
        self.epoch = repaired.epoch

    async def ended(self) -> None:
        await self.mesh.sessions.close_session(self.session_id, finish_cause=FinishCause.EOG, generated_tokens=3)
        (row,) = await self.mesh.rows()
        assert (row.finish_cause, row.generated_tokens) == ("eog", 3)

    async def lease_ended(self) -> None:
        self.mesh.monotonic.now += SETTINGS.session_lease_s
        assert await self.mesh.sessions.expire() == (self.session_id,)

    async def tickets_ended(self) -> None:
        self.mesh.unix.now += SETTINGS.session_ttl_s
        assert await self.mesh.sessions.expire() == (self.session_id,)

    async def forgotten(self) -> None:
        self.mesh.unix.now += SETTINGS.keep_closed_sessions_s
        self.mesh.monotonic.now += TIDY_S
        await self.mesh.sessions.expire()

    async def state(self) -> SessionState | None:
        """As the database has it; memory must agree on whether it is open."""
        rows = await self.mesh.rows()
        state = SessionState(rows[0].state) if rows else None
        assert (state is SessionState.OPEN) == (self.mesh.sessions.n_open == 1)
        if rows:
            assert rows[0].epoch == self.epoch
            assert (rows[0].closed_unix_s is None) == (state is SessionState.OPEN)
        return state


Step = Callable[[Walk], Awaitable[None]]

HAPPENS: dict[SessionEvent, Step] = {
    SessionEvent.OPENED: Walk.opened,
    SessionEvent.RENEWED: Walk.renewed,
    SessionEvent.REPAIRED: Walk.repaired,
    SessionEvent.ENDED: Walk.ended,
    SessionEvent.LEASE_ENDED: Walk.lease_ended,
    SessionEvent.TICKETS_ENDED: Walk.tickets_ended,
    SessionEvent.FORGOTTEN: Walk.forgotten,
}
#: How to get into each state.
ARRANGED: dict[SessionState | None, tuple[SessionEvent, ...]] = {
    None: (),
    SessionState.OPEN: (SessionEvent.OPENED,),
    SessionState.CLOSED: (SessionEvent.OPENED, SessionEvent.ENDED),
    SessionState.ORPHANED: (SessionEvent.OPENED, SessionEvent.LEASE_ENDED),
    SessionState.EXPIRED: (SessionEvent.OPENED, SessionEvent.TICKETS_ENDED),
}


@pytest.fixture
async def walk(tmp_path: Path) -> AsyncIterator[Walk]:
    database = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    mesh = SessionMesh(database)
    await mesh.offer(*halves(), advertise(make_shard("b2", "3:8")))
    yield Walk(mesh)
    await database.close()


@pytest.mark.parametrize(("before", "event"), list(TRANSITIONS), ids=str)
async def test_every_transition(walk: Walk, before: SessionState | None, event: SessionEvent) -> None:
    for step in ARRANGED[before]:
        await HAPPENS[step](walk)
    assert await walk.state() == before
    await HAPPENS[event](walk)
    assert await walk.state() == TRANSITIONS[before, event]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("state", [state for state in ARRANGED if state is not SessionState.OPEN], ids=str)
async def test_only_an_open_session_is_renewed_or_repaired(
    walk: Walk, state: SessionState | None, restarted: bool
) -> None:
    for step in ARRANGED[state]:
        await HAPPENS[step](walk)
    if restarted:
        walk.mesh = await walk.mesh.restarted()
    assert await walk.mesh.sessions.renew_sessions([walk.session_id]) == (walk.session_id,)
    with pytest.raises(SessionLost):
        await walk.mesh.sessions.repair_session(walk.session_id, epoch=1, lost_shards=[])
    assert await walk.state() == state


def test_what_is_not_in_the_table_is_refused() -> None:
    for state, event in product((None, *SessionState), SessionEvent):
        if (state, event) in TRANSITIONS:
            assert after(state, event) == TRANSITIONS[state, event]
        else:
            with pytest.raises(SessionLost):
                after(state, event)


def test_the_page_has_the_table() -> None:
    _, _, rest = PAGE.partition("## The tracker's states\n")
    rows = re.findall(r"^\| (\w+) \| ([a-z ]+) \| (\w+) \|", rest.split("\n## ")[0], flags=re.MULTILINE)
    told = {
        (None if before == "unknown" else before, event): None if to == "unknown" else to
        for before, event, to in rows
        if before != "state"
    }
    assert told == {
        (before and before.value, event.value): to and to.value for (before, event), to in TRANSITIONS.items()
    }


@pytest.mark.parametrize("name", ["session_lease_s", "session_ttl_s", "suspect_s", "keep_closed_sessions_s", "sweep_s"])
def test_the_page_has_the_limits_of_the_tracker(name: str) -> None:
    has_limit(name, getattr(TrackerSettings(), name))


@pytest.mark.parametrize("name", ["renew_s", "touch_s"])
def test_the_page_has_the_limits_of_the_gateway(name: str) -> None:
    has_limit(name, getattr(GatewaySettings(require_api_key=False), name))


@pytest.mark.parametrize("flag", ["orphan-timeout-ms", "idle-timeout-ms"])
def test_the_page_has_the_limits_of_the_worker(flag: str) -> None:
    flags = (ROOT / "native" / "worker" / "flags.cpp").read_text()
    default = re.search(rf'"--{flag}", "N",\s*"[^"]*default (\d+)\)', flags)
    assert default is not None
    has_limit(f"--{flag}", int(default[1]) / 1000)


def has_limit(name: str, value: float) -> None:
    assert re.search(rf"`{name}`[^|\n]*\| {value:g} s \|", PAGE), (name, value)
