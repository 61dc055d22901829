"""The states of a Route Session as the tracker sees it, and every way from one to another. See docs/sessions.md."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from meshnet.errors import SessionLost


class SessionState(StrEnum):
    """Where a session stands. All but ``OPEN`` are final for the gateway: no ticket is made any more."""

    OPEN = "open"  # its tickets are good, its gateway renews it
    CLOSED = "closed"  # its gateway told how it ended
    ORPHANED = "orphaned"  # its gateway has not renewed it in time
    EXPIRED = "expired"  # its tickets have run out


class SessionEvent(StrEnum):
    """What can happen to a session."""

    OPENED = "opened"  # a gateway asked for a route, and got one
    REPAIRED = "repaired"  # a gateway asked for a route in place of a broken one, and got one
    RENEWED = "renewed"  # its gateway still wants it
    ENDED = "ended"  # its gateway tells how it ended, and what its hops did
    LEASE_ENDED = "lease ended"  # nobody renewed it for ``session_lease_s``
    TICKETS_ENDED = "tickets ended"  # ``session_ttl_s`` after the last tickets were made
    FORGOTTEN = "forgotten"  # ``keep_closed_sessions_s`` after it was closed, by whomever


#: Every transition there is. None stands for a session that the tracker does not know.
TRANSITIONS: Mapping[tuple[SessionState | None, SessionEvent], SessionState | None] = MappingProxyType(
    {
        (None, SessionEvent.OPENED): SessionState.OPEN,
        (SessionState.OPEN, SessionEvent.RENEWED): SessionState.OPEN,
        (SessionState.OPEN, SessionEvent.REPAIRED): SessionState.OPEN,
        (SessionState.OPEN, SessionEvent.ENDED): SessionState.CLOSED,
        (SessionState.OPEN, SessionEvent.LEASE_ENDED): SessionState.ORPHANED,
        (SessionState.OPEN, SessionEvent.TICKETS_ENDED): SessionState.EXPIRED,
        # Said twice, because the first answer was lost; what its hops did may come with either.
        (SessionState.CLOSED, SessionEvent.ENDED): SessionState.CLOSED,
        # The gateway lives after all, and knows the end.
        (SessionState.ORPHANED, SessionEvent.ENDED): SessionState.CLOSED,
        (SessionState.EXPIRED, SessionEvent.ENDED): SessionState.CLOSED,
        (SessionState.CLOSED, SessionEvent.FORGOTTEN): None,
        (SessionState.ORPHANED, SessionEvent.FORGOTTEN): None,
        (SessionState.EXPIRED, SessionEvent.FORGOTTEN): None,
    }
)


def after(state: SessionState | None, event: SessionEvent) -> SessionState | None:
    """The state after ``event``.

    Raises:
        SessionLost: it cannot happen to a session in that state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        where = f"a session that is {state.value}" if state else "a session that the tracker does not know"
        raise SessionLost(f"{where} cannot be {event.value}") from None
