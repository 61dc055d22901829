"""Domain nouns shared by every process: what a shard is, what a route is, what a generation tells about itself.

All ranges are half-open ``[start, end)``. Units are in the names (``_ms``, ``_bytes``, ``_tokens``). The models are
frozen and validated on construction, so whatever comes from a peer is either well-formed or a
``pydantic.ValidationError`` at the door. Unknown fields are ignored: newer peers may say more.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Most tokens (prompt + generated) of one session, whatever the model or shard could hold.
MAX_SESSION_TOKENS = 131_072

Digest = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9:+._/-]+$")]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9:+._/@-]*$")]
Address = Annotated[
    str, Field(min_length=3, max_length=260, pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")
]


class Noun(BaseModel):
    """Base of all domain models: immutable, strict about types, tolerant of unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class LayerRange(Noun):
    """Half-open range of layers ``[start, end)``, never empty."""

    start: Annotated[int, Field(ge=0, le=100_000)]
    end: Annotated[int, Field(ge=1, le=100_000)]

    @model_validator(mode="after")
    def _not_empty(self) -> LayerRange:
        if self.end <= self.start:
            raise ValueError(f"layer range {self.start}:{self.end} is empty; write START:END with START < END")
        return self

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``START:END``.

        Raises:
            ValueError: not two whole numbers, or empty.
        """
        start, colon, end = text.partition(":")
        if not colon or not start.isdecimal() or not end.isdecimal():
            raise ValueError(f"layer range {text!r} is not START:END, for example 0:15")
        if int(end) <= int(start):
            # Said here too: with an end of 0 the field's own limit would speak first, and say less.
            raise ValueError(f"layer range {text} is empty; write START:END with START < END")
        return cls(start=int(start), end=int(end))


class TensorSpec(Noun):
    """One named tensor of a boundary. ``shape`` is per token, fastest-moving dimension first."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    dtype: Annotated[str, Field(pattern=r"^(f32|f16|bf16|i32)$")]
    shape: tuple[Annotated[int, Field(ge=1)], ...]


class Boundary(Noun):
    """Typed tensors that cross a seam; empty at the model's entrance and exit."""

    tensors: tuple[TensorSpec, ...] = ()
    digest: Digest


class Cut(Noun):
    """A layer before which a shard's range may be cut again, and what crosses there."""

    layer: Annotated[int, Field(ge=1, le=100_000)]
    boundary: Boundary


class Shard(Noun):
    """A layer range of an artifact loaded in one worker, as its node advertises it."""

    shard_id: Name
    address: Address
    model: Name
    artifact_digest: Digest
    architecture: Name
    n_layer: Annotated[int, Field(ge=1, le=100_000)]
    layers: LayerRange
    boundary_in: Boundary
    boundary_out: Boundary
    compatibility_id: Digest
    build_id: Annotated[str, Field(max_length=1000)]
    engine: Name
    n_ctx_train: Annotated[int, Field(ge=1)]
    session_capacity_tokens: Annotated[int, Field(ge=1)]
    session_slots: Annotated[int, Field(ge=1)]
    max_step_tokens: Annotated[int, Field(ge=1)]
    weight_bytes: Annotated[int, Field(ge=0)] = 0
    kv_bytes: Annotated[int, Field(ge=0)] = 0
    compute_bytes: Annotated[int, Field(ge=0)] = 0
    kv_bytes_per_token: Annotated[int, Field(ge=0)] = 0
    #: Where a session may use a part of the range only; empty if the worker serves it as a whole.
    cuts: Annotated[tuple[Cut, ...], Field(max_length=2000)] = ()

    @model_validator(mode="after")
    def _inside_model(self) -> Shard:
        if self.layers.end > self.n_layer:
            raise ValueError(f"layers {self.layers} end after the model's last layer ({self.n_layer})")
        return self

    @property
    def is_head(self) -> bool:
        return self.layers.start == 0

    @property
    def is_tail(self) -> bool:
        return self.layers.end == self.n_layer

    def part(self, layers: LayerRange) -> Shard:
        """This shard serving only ``layers`` of its range to a session.

        Raises:
            ValueError: it cannot be cut there.
        """
        if layers == self.layers:
            return self
        boundaries = {cut.layer: cut.boundary for cut in self.cuts}
        boundaries |= {self.layers.start: self.boundary_in, self.layers.end: self.boundary_out}
        inside = self.layers.start <= layers.start and layers.end <= self.layers.end
        if not inside or layers.start not in boundaries or layers.end not in boundaries:
            raise ValueError(f"shard {self.shard_id} ({self.layers}) cannot serve layers {layers} alone")
        return self.model_copy(
            update={
                "layers": layers,
                "boundary_in": boundaries[layers.start],
                "boundary_out": boundaries[layers.end],
                "cuts": tuple(cut for cut in self.cuts if layers.start < cut.layer < layers.end),
            }
        )

    def follows(self, previous: Shard) -> bool:
        """True if this shard can take over exactly where ``previous`` stops."""
        return (
            self.artifact_digest == previous.artifact_digest
            and self.compatibility_id == previous.compatibility_id
            and self.n_layer == previous.n_layer
            and self.layers.start == previous.layers.end
            and self.boundary_in.digest == previous.boundary_out.digest
        )


class Route(Noun):
    """An ordered list of shards that covers ``[0, n_layer)`` exactly."""

    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _covers(self) -> Route:
        if not self.shards[0].is_head:
            raise ValueError("a route starts at layer 0")
        if not self.shards[-1].is_tail:
            raise ValueError(f"a route ends at the last layer; this one stops at {self.shards[-1].layers.end}")
        for previous, shard in zip(self.shards, self.shards[1:], strict=False):
            if not shard.follows(previous):
                raise ValueError(f"shard {shard.shard_id} cannot follow {previous.shard_id}")
        return self

    @property
    def session_capacity_tokens(self) -> int:
        """Most tokens one session may hold on every hop."""
        return min(MAX_SESSION_TOKENS, *(shard.session_capacity_tokens for shard in self.shards))


class HopSteps(Noun):
    """How many tokens a hop of a route computes in one step at most."""

    layers: LayerRange
    max_step_tokens: Annotated[int, Field(ge=1)]


class Continuation(Noun):
    """What a route must have in common with the one that it takes over from, so that an answer goes on with the tokens
    that it would have had: the weights, what computes with them, and on the same layers steps of the same size, which a
    windowed cache's own size follows."""

    artifact_digest: Digest
    compatibility_id: Digest
    hops: Annotated[tuple[HopSteps, ...], Field(min_length=1, max_length=1024)]

    @classmethod
    def of(cls, route: Route) -> Continuation:
        """Of an answer that began on ``route``."""
        head = route.shards[0]
        hops = (HopSteps(layers=shard.layers, max_step_tokens=shard.max_step_tokens) for shard in route.shards)
        return cls(artifact_digest=head.artifact_digest, compatibility_id=head.compatibility_id, hops=tuple(hops))

    def fits(self, shard: Shard) -> bool:
        """Whether the answer may go on with any of this shard's layers."""
        return (
            shard.artifact_digest == self.artifact_digest
            and shard.compatibility_id == self.compatibility_id
            and all(
                shard.max_step_tokens == hop.max_step_tokens
                for hop in self.hops
                if hop.layers.start < shard.layers.end and shard.layers.start < hop.layers.end
            )
        )

    def fitting(self, shard: Shard) -> Shard | None:
        """The shard, or the part of it that takes over from one hop alone, if that fits; None if nothing does."""
        if self.fits(shard):
            return shard
        if (shard.artifact_digest, shard.compatibility_id) != (self.artifact_digest, self.compatibility_id):
            return None
        places = {shard.layers.start, shard.layers.end, *(cut.layer for cut in shard.cuts)}
        for hop in self.hops:
            if {hop.layers.start, hop.layers.end} <= places and self.fits(part := shard.part(hop.layers)):
                return part
        return None


class Ticket(Noun):
    """Permission to use one worker for one session; see ``Ticket`` in shard.proto."""

    session_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    epoch: Annotated[int, Field(ge=0)]
    expires_unix_s: Annotated[int, Field(ge=0)]
    mac: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)]


class Replacement(Noun):
    """A shard that is new on a repaired route, and how long its node took to get it ready, whenever that was.

    ``pull_ms`` is None for a file of that machine.
    """

    shard: str
    pull_ms: float | None = None
    load_ms: float | None = None


class RouteSession(Noun):
    """One conversation bound to a route: the route, and one ticket per hop in the same order."""

    session_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    epoch: Annotated[int, Field(ge=0)]
    route: Route
    tickets: tuple[Ticket, ...]
    #: Of a repaired route: its shards that were not part of the one before.
    replacements: tuple[Replacement, ...] = ()
    #: The tracker gives up a session that is not renewed for so long; None if it does not say.
    lease_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _ticket_per_hop(self) -> RouteSession:
        if len(self.tickets) != len(self.route.shards):
            raise ValueError("a route session has one ticket per hop")
        return self


class ServedModel(Noun):
    """A model that at least one complete route serves now."""

    model: Name
    artifact_digest: Digest
    architecture: Name
    session_capacity_tokens: int
    created_unix_s: int


class FinishCause(StrEnum):
    """Why a generation ended."""

    EOG = "eog"  # the model's end-of-generation token
    STOP = "stop"  # a stop string of the request
    LENGTH = "length"  # max_tokens
    CAPACITY = "capacity"  # the session's token capacity on this route
    CANCELLED = "cancelled"  # the client went away
    FAILED = "failed"  # a hop was lost or refused


class HopTelemetry(Noun):
    """What one hop measured for one generation."""

    shard: str
    node: str | None = None
    layers: str
    queue_ms: float
    compute_ms: float
    network_ms: float
    sample_ms: float = 0.0
    bytes_in: int
    bytes_out: int
    prefill_tokens: int
    decode_tokens: int


class RepairTelemetry(Noun):
    """One repair of the route in the middle of a generation.

    ``detect_ms`` is from the last sign of life of the route to the notice that it is broken, ``plan_ms`` until a new
    route was had (waiting for a replacement included), ``open_ms`` until every hop was open again, ``refill_ms`` until
    the first token after it. ``layer_tokens`` counts what had to be computed again: layers x tokens, over all hops.
    """

    epoch: int
    cause: str
    hop: str | None
    detect_ms: float
    plan_ms: float
    open_ms: float
    refill_ms: float | None
    layer_tokens: int
    kept_layer_tokens: int
    replacements: tuple[Replacement, ...] = ()


class HopWork(Noun):
    """What one hop did for one session in one epoch: a row of the ledger.

    ``measured`` is False where the hop could not be asked any more; its counts are then what the answer proves.
    """

    epoch: Annotated[int, Field(ge=1)]
    hop_index: Annotated[int, Field(ge=0, le=1024)]
    shard_id: Name
    layers: LayerRange
    prefill_tokens: Annotated[int, Field(ge=0, le=2**53)]
    decode_tokens: Annotated[int, Field(ge=0, le=2**53)]
    compute_us: Annotated[int, Field(ge=0, le=2**53)] = 0
    bytes_in: Annotated[int, Field(ge=0, le=2**53)] = 0
    bytes_out: Annotated[int, Field(ge=0, le=2**53)] = 0
    measured: bool = True


class Telemetry(Noun):
    """Generation Telemetry: what each generation returns about itself (field ``meshnet`` of a response).

    ``hops`` may lack a hop that was lost before it could report; ``missing_hops`` then names it.
    """

    session: str
    epoch: int
    model: str
    artifact: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    total_ms: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    finish_cause: FinishCause
    repairs: tuple[RepairTelemetry, ...] = ()
    hops: tuple[HopTelemetry, ...]
    missing_hops: tuple[str, ...] = ()


class RouteSource(Protocol):
    """What the gateway needs of a tracker; implemented in-process and over HTTP.

    All methods raise ``meshnet.errors.MeshnetError`` subclasses: ``UnknownModel``, ``NoRoute``, ``Overloaded``,
    ``TrackerUnavailable``.
    """

    async def models(self) -> Sequence[ServedModel]:
        """Models that a complete route serves now."""
        ...

    async def open_session(
        self,
        model: str,
        *,
        avoid_shards: Sequence[str] = (),
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        continuing: Continuation | None = None,
    ) -> RouteSession:
        """Choose a route for ``model`` (avoiding shards that just refused or failed) and ticket every hop.

        The token counts are guesses that the choice may use: the prompt is tokenized only later, by the head.
        ``continuing``: for the rest of an answer that another route began.
        """
        ...

    async def repair_session(
        self, session_id: str, *, epoch: int, lost_shards: Sequence[str], continuing: Continuation | None = None
    ) -> RouteSession:
        """A route for the same session with a raised epoch, without ``lost_shards``, that keeps as many as it can of
        the other shards and their ranges. ``epoch`` is the one that broke; ``continuing`` as in `open_session`.

        Raises:
            NoRoute: nothing can take the place of what is lost, now; it may later.
            SessionLost: the tracker does not know the session, or it is closed, or ``epoch`` is not its last one.
        """
        ...

    async def renew_sessions(self, session_ids: Sequence[str]) -> Sequence[str]:
        """These sessions are still wanted; tells which of them are not open (any more). A session that nobody renews is
        an orphan, and is closed."""
        ...

    async def close_session(
        self, session_id: str, *, finish_cause: FinishCause, generated_tokens: int, work: Sequence[HopWork] = ()
    ) -> None:
        """Record the end of a session, and in the ledger what its hops did. Unknown or already closed sessions are not
        an error; work that was recorded before is not recorded twice."""
        ...
