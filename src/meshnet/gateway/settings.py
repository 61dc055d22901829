"""Every limit of the gateway in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshnet.errors import UsageError

_MAY_BE_ZERO = frozenset({"repair_timeout_s"})


@dataclass(frozen=True)
class GatewaySettings:
    """Limits and keys of one gateway.

    Raises:
        UsageError: a limit is not positive, or the API would be open to anyone without that being asked for.
    """

    #: Keys that clients may present as ``Authorization: Bearer <key>``.
    api_keys: tuple[str, ...] = ()
    #: False serves anyone who can connect.
    require_api_key: bool = True
    #: /metrics holds counts and timings only (no prompt, no session, no address), and scrapers rarely carry keys, so
    #: it is open like /health unless this is set.
    metrics_require_api_key: bool = False

    #: Largest request body. A prompt of 131,072 tokens of text is well under 1 MiB.
    max_body_bytes: int = 8 * 1024 * 1024
    #: A request whose body is not complete after this long is refused, so that nobody holds connections for nothing.
    body_timeout_s: float = 60.0
    #: Generations at once; further requests get 429.
    max_running: int = 256
    #: Routes tried for one request before it is refused.
    route_attempts: int = 3

    #: Deadline of Describe, Tokenize and Open. A worker answers these beside its computing.
    call_timeout_s: float = 5.0
    #: Deadline of Close, and so the longest that the end of an answer waits for a hop's measurements.
    close_timeout_s: float = 1.0
    #: A hop that does not return a frame for this long is lost. One prefill chunk on a slow machine must fit.
    step_timeout_s: float = 60.0
    #: How much longer the gateway waits for the head, so that the head can report another hop as lost first.
    step_grace_s: float = 1.0
    #: Repairs of one answer's route, at most …
    repair_attempts: int = 8
    #: … each of which may take so long to find a route and open it: waiting for a replacement included, computing the
    #: history again not. 0: an answer whose route breaks ends with an error at once.
    repair_timeout_s: float = 30.0
    #: Between two questions to the tracker whether the route can be repaired by now.
    repair_poll_s: float = 0.1
    #: How often surviving hops are told that the session is still wanted while a route is looked for. They free it
    #: after 10 s without a word.
    touch_s: float = 2.0
    #: How often the tracker is told which sessions are still wanted. It closes others after a minute.
    renew_s: float = 15.0

    #: How often a tracker that was away is told again how sessions ended.
    end_retry_s: float = 1.0

    #: Longest time of one answer. Below the tickets' lifetime, so that Close is still permitted at its end.
    generation_deadline_s: float = 3000.0

    #: A comment is sent on a stream that was silent for this long, so that proxies keep it open.
    keepalive_s: float = 10.0
    #: A client that takes nothing off its connection for this long is gone.
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or 0 < value < math.inf:
                continue
            if field.name not in _MAY_BE_ZERO:
                raise UsageError(f"gateway setting {field.name} is {value}; give a number above 0")
            if value != 0:
                raise UsageError(f"gateway setting {field.name} is {value}; give 0 or a number above it")
        if self.require_api_key and not self.api_keys:
            raise UsageError("the gateway has no API key; give one, or turn keys off explicitly (require_api_key)")
        if not all(self.api_keys):
            raise UsageError("an API key is empty")
