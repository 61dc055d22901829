"""What routing looks at: the shards offered now, the request, and the links between nodes."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Offer:
    """A shard that can be used now. ``busy`` is sessions and waiting frames per session slot; at least 0.

    A full shard (``free_slots`` 0) is still an offer: the worker alone knows whether it has room, and refuses if not.
    ``free_slots`` None is taken from ``busy``. ``prefill_us`` and ``decode_us`` are microseconds per layer and token as
    measured; None where nothing was measured yet. ``recent`` is how many sessions were given to it lately, however the
    caller lets them fade: by it shards take turns that are about equal and idle.
    """

    shard: Shard
    busy: float = 0.0
    node_id: str = ""
    free_slots: int | None = None
    prefill_us: float | None = None
    decode_us: float | None = None
    recent: float = 0.0
    #: What follows from the rest, worked out once: an offer is looked at for many requests.
    shard_id: str = field(init=False, repr=False, compare=False)
    model: str = field(init=False, repr=False, compare=False)
    capacity_tokens: int = field(init=False, repr=False, compare=False)
    n_layers: int = field(init=False, repr=False, compare=False)
    shape: Shape = field(init=False, repr=False, compare=False)
    full: bool = field(init=False, repr=False, compare=False)
    #: How much longer everything takes for those who are served already.
    slowdown: float = field(init=False, repr=False, compare=False)

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
