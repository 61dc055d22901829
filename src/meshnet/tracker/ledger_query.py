"""What to sum the ledger by, and over which period: read from text, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from meshnet.errors import RequestError

DAY_S = 86_400

#: Most lines of an answer.
MAX_LINES = 10_000

_DURATION = re.compile(r"^([0-9]{1,6})([smhdw])$")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S}


class LedgerColumn(StrEnum):
    """What lines can be told apart by."""

    NODE = "node"
    MODEL = "model"
    DAY = "day"


@dataclass(frozen=True)
class LedgerQuery:
    """Half-open period ``[since, until)``; ``since`` None is from the beginning."""

    by: tuple[LedgerColumn, ...]
    since_unix_s: int | None
    until_unix_s: int

    @classmethod
    def parse(cls, by: str, since: str | None, until: str | None, *, now_unix_s: int) -> LedgerQuery:
        """Read ``node,day`` and two moments.

        Raises:
            RequestError: something is not what it should be, or the period is empty.
        """
        # The present second belongs to what is asked for, if nobody says where to end.
        until_unix_s = now_unix_s + 1 if until is None else parse_moment("until", until, now_unix_s=now_unix_s)
        since_unix_s = None if since is None else parse_moment("since", since, now_unix_s=now_unix_s)
        if since_unix_s is not None and since_unix_s >= until_unix_s:
            raise RequestError(f"the period is empty: it begins ({since}) at or after its end", param="since")
        return cls(parse_columns(by), since_unix_s, until_unix_s)


def parse_columns(text: str) -> tuple[LedgerColumn, ...]:
    """Read a list like ``node,day``.

    Raises:
        RequestError: it names something else, or something twice.
    """
    names = [name.strip() for name in text.split(",")]
    known = [column.value for column in LedgerColumn]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None or len(set(names)) != len(names):
        told = f"{unknown!r} is none" if unknown is not None else "one of them twice"
        raise RequestError(f"by takes a list of {', '.join(known)}, for example node,day; {told}", param="by")
    return tuple(LedgerColumn(name) for name in names)


def parse_moment(name: str, text: str, *, now_unix_s: int) -> int:
    """Read an ISO date or time (UTC unless it says otherwise), or a duration back from now: ``90m``, ``24h``, ``7d``.

    Raises:
        RequestError: it is neither.
    """
    duration = _DURATION.match(text)
    if duration:
        return max(0, now_unix_s - int(duration[1]) * _UNITS_S[duration[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"{name} is {text[:40]!r}; write a date (2026-01-31), a time (2026-01-31T12:00) or a duration back from "
            "now (90m, 24h, 7d)",
            param=name,
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1))


def iso_day(unix_s: int) -> str:
    """The day in UTC that holds this second."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()
