"""What routing looks at: the shards offered now, the request, and the links between nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from meshnet.core import Shard
from meshnet.planner.shapes import Shape, shape_of

#: Guesses where a request does not say.
DEFAULT_PROMPT_TOKENS = 500
DEFAULT_ANSWER_TOKENS = 200

#: How much of an open session a recently opened one counts. Small: it only decides between what is about equal.
RECENT_WEIGHT = 0.05

#: A cost that was measured in so long a time counts as much as the mean of all shards; in less, less. A worker that had
#: to wait for its core once or twice in a few milliseconds of computing is not slow.
DOUBT_US = 2e6


@dataclass(frozen=True, slots=True)
class Offer:
    """A shard that can be used now. ``busy`` is sessions and waiting frames per session slot; at least 0.

    A full shard (``free_slots`` 0) is still an offer: the worker alone knows whether it has room, and refuses if not.
    ``free_slots`` None is taken from ``busy``. ``prefill_us`` and ``decode_us`` are microseconds per layer and token as
    measured; None where nothing was measured yet. ``*_seen_us`` is how long that was measured. ``recent`` is how many
    sessions were given to it lately, however the caller lets them fade: by it shards take turns that are about equal
    and idle.
    """

    shard: Shard
    busy: float = 0.0
    node_id: str = ""
    free_slots: int | None = None
    prefill_us: float | None = None
    decode_us: float | None = None
    recent: float = 0.0
    prefill_seen_us: float = math.inf
    decode_seen_us: float = math.inf
    #: What follows from the rest, worked out once: an offer is looked at for many requests.
    shard_id: str = field(init=False, repr=False, compare=False)
    model: str = field(init=False, repr=False, compare=False)
    capacity_tokens: int = field(init=False, repr=False, compare=False)
    n_layers: int = field(init=False, repr=False, compare=False)
    shape: Shape = field(init=False, repr=False, compare=False)
    full: bool = field(init=False, repr=False, compare=False)
    #: How much longer everything takes for those who are served already.
    slowdown: float = field(init=False, repr=False, compare=False)
    #: Tokens and layers per microsecond: what is known of that, and how much of the mean of all shards to add.
    prefill_known: float = field(init=False, repr=False, compare=False)
    prefill_doubt: float = field(init=False, repr=False, compare=False)
    decode_known: float = field(init=False, repr=False, compare=False)
    decode_doubt: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shard = self.shard
        keep = partial(object.__setattr__, self)
        keep("shard_id", shard.shard_id)
        keep("model", shard.model)
        keep("capacity_tokens", shard.session_capacity_tokens)
        keep("n_layers", len(shard.layers))
        keep("shape", shape_of(shard))
        keep("full", self.busy >= 1.0 if self.free_slots is None else self.free_slots <= 0)
        keep("slowdown", 1.0 + self.busy * shard.session_slots + RECENT_WEIGHT * self.recent)
        for name, cost_us, seen_us in (
            ("prefill", self.prefill_us, self.prefill_seen_us),
            ("decode", self.decode_us, self.decode_seen_us),
        ):
            doubt = 1.0 if cost_us is None else DOUBT_US / (DOUBT_US + seen_us)
            keep(f"{name}_known", 0.0 if cost_us is None else (1.0 - doubt) / cost_us)
            keep(f"{name}_doubt", doubt)


@dataclass(frozen=True)
class RouteRequest:
    """What is known of a request before its prompt is tokenized. ``capacity_tokens`` 0: any session length will do."""

    prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    answer_tokens: int = DEFAULT_ANSWER_TOKENS
    capacity_tokens: int = 0


@dataclass(frozen=True)
class Link:
    """The way from one node to another. ``bytes_per_s`` None: not measured."""

    rtt_ms: float
    bytes_per_s: float | None = None


#: Measured links by (from node, to node).
Links = Mapping[tuple[str, str], Link]

NO_LINKS: Links = MappingProxyType({})
