"""What travels between nodes, gateways, the command line and the tracker's HTTP face.

Parsed strictly (no string for a number) with `parse`; unknown fields are ignored, so newer peers may say more.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, model_validator

from meshnet.core import (
    Address,
    Continuation,
    Digest,
    FinishCause,
    HopWork,
    LayerRange,
    Name,
    Noun,
    ServedModel,
    Shard,
)
from meshnet.errors import RequestError

#: Of the Meshnet that runs here.
VERSION = version("meshnet")

#: Of the tracker's calls.
PREFIX = "/tracker/v1"

#: Most shards one node may advertise.
MAX_SHARDS_PER_NODE = 64

#: Most sessions that one call renews.
MAX_RENEWED = 10_000

#: Swarms that an artifact had under other file names, and that stay open.
MAX_EARLIER_SWARMS = 8

NODE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Epoch = Annotated[int, Field(ge=1, le=2**53)]
SessionId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
#: Random per process start: tells a repeated call of one process from a second process with the same node id.
Instance = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
#: 32 random bytes of the tracker.
Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: Ed25519, raw.
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Machine = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WorkerKey = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){16,64}$")]
ArtifactDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
InfoHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(min_length=1, max_length=100)]

N = TypeVar("N", bound=Noun)


class ShardLoad(Noun):
    """What a worker reports about itself: ``StatusResponse`` in shard.proto."""

    open_sessions: Count = 0
    kv_tokens: Count = 0
    queued_frames: Count = 0
    draining: bool = False
    prefill_tokens: Count = 0
    prefill_compute_us: Count = 0
    decode_tokens: Count = 0
    decode_compute_us: Count = 0
    resident_bytes: Count = 0


class ShardAdvertisement(Noun):
    """A shard whose worker is up, the key its tickets are made with, its load, and what it took to get there."""

    shard: Shard
    worker_key: WorkerKey
    load: ShardLoad = ShardLoad()
    #: From the wish for the range to its bytes being there and verified; None for a file of the machine.
    pull_ms: Count | None = None
    #: From starting the worker to its being ready.
    load_ms: Count | None = None


class Challenge(Noun):
    """The tracker's answer to a node that wants to register: sign this."""

    nonce: Nonce


class Registration(Noun):
    """A node asks for a lease, and proves that it is the node it says.

    ``signature`` is Ed25519 over ``registration_text``. ``machine`` tells a restarted agent from a second machine that
    holds a copy of the identity; it is a digest and says nothing else.
    """

    instance: Instance
    version: Version
    public_key: PublicKey
    machine: Machine
    nonce: Nonce
    signature: Signature


def registration_text(node_id: str, instance: str, machine: str, nonce: str) -> bytes:
    """What a node signs when it registers."""
    return f"meshnet-register-v1\n{node_id}\n{instance}\n{machine}\n{nonce}".encode()


class Lease(Noun):
    """The tracker's answer: quote the epoch in every heartbeat, and report every ``heartbeat_ms``."""

    lease_epoch: Epoch
    heartbeat_ms: Annotated[int, Field(ge=1)]
    ttl_ms: Annotated[int, Field(ge=1)]


class NodeCapacity(Noun):
    """What a node lends beside the shards it was started with: the planner may place layers in it."""

    memory_bytes: Count
    disk_bytes: Count
    threads: Annotated[int, Field(ge=1, le=10_000)]
    #: The only artifact that the node takes layers of: digest, its first digits, or name. None for any.
    artifact: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class LinkMeasure(Noun):
    """How a node reaches another node's worker: smallest round trip, and throughput where it was measured."""

    shard_id: Name
    rtt_ms: Annotated[float, Field(ge=0, le=1e6)]
    bytes_per_s: Annotated[float, Field(gt=0, le=1e15)] | None = None


class Activity(Noun):
    """A range that a node is getting ready, and how far it is. ``trouble`` says what it last failed at."""

    artifact_digest: Digest
    model: Name
    layers: LayerRange
    state: Annotated[str, Field(pattern=r"^(pulling|loading|failed|draining)$")]
    since_unix_s: Annotated[float, Field(ge=0, le=1e11)]
    verified_bytes: Count = 0
    wanted_bytes: Count = 0
    trouble: Annotated[str, Field(max_length=1000)] = ""
    #: The engine cannot cut these layers out of the model, so nobody need try again.
    refused: bool = False


class Heartbeat(Noun):
    """All shards of a node whose workers are up now. A shard that is missing here is withdrawn."""

    lease_epoch: Epoch
    instance: Instance
    shards: Annotated[tuple[ShardAdvertisement, ...], Field(max_length=MAX_SHARDS_PER_NODE)] = ()
    #: Given by a node that takes what the planner assigns.
    capacity: NodeCapacity | None = None
    links: Annotated[tuple[LinkMeasure, ...], Field(max_length=256)] = ()
    activities: Annotated[tuple[Activity, ...], Field(max_length=MAX_SHARDS_PER_NODE)] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Heartbeat:
        ids = [advertised.shard.shard_id for advertised in self.shards]
        if len(set(ids)) != len(ids):
            raise ValueError("two shards have the same shard_id")
        return self


class Pulse(Noun):
    """What a heartbeat that is otherwise malformed still tells: its node is there."""

    lease_epoch: Epoch
    instance: Instance


class Assignment(Noun):
    """A range that the planner wants this node to hold. What is no longer named is drained and given up."""

    artifact_digest: ArtifactDigest
    model: Name
    layers: LayerRange
    context_tokens: Annotated[int, Field(ge=1)]
    sessions: Annotated[int, Field(ge=1)]
    #: What the range is expected to take. An estimate: a node that holds the same otherwise leaves it alone.
    memory_bytes: Count = 0
    #: Answers wait for it: what is in its way is given up without waiting long for its sessions.
    urgent: bool = False


class Neighbour(Noun):
    """A worker that this node may come to talk to, and should measure the way to."""

    shard_id: Name
    address: Address


class HeartbeatAnswer(Noun):
    """What the tracker wants of the node. ``assignments`` is None for a node that offered no capacity."""

    assignments: tuple[Assignment, ...] | None = None
    neighbours: tuple[Neighbour, ...] = ()
    #: Shards that take no sessions, and why not.
    not_ready: dict[str, str] = Field(default_factory=dict)


class Departure(Noun):
    """A node gives its lease back."""

    lease_epoch: Epoch
    instance: Instance


class OpenSession(Noun):
    """A gateway asks for a route and its tickets."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    avoid_shards: Annotated[tuple[Name, ...], Field(max_length=1000)] = ()
    prompt_tokens: Count | None = None
    answer_tokens: Count | None = None
    continuing: Continuation | None = None


class RepairSession(Noun):
    """A gateway asks for a route in place of a broken one."""

    epoch: Epoch
    lost_shards: Annotated[tuple[Name, ...], Field(max_length=1000)]
    continuing: Continuation | None = None


class RenewSessions(Noun):
    """A gateway still wants these sessions."""

    session_ids: Annotated[tuple[SessionId, ...], Field(max_length=MAX_RENEWED)]


class UnknownSessions(Noun):
    """Those that are not open (any more)."""

    session_ids: tuple[SessionId, ...]


class SessionEnd(Noun):
    """How a session ended, and what its hops did."""

    finish_cause: FinishCause
    generated_tokens: Count
    work: Annotated[tuple[HopWork, ...], Field(max_length=4096)] = ()


class LedgerCounts(Noun):
    """Sums over rows of the ledger. ``layer_tokens`` is layers x tokens, prefill and decode; ``unmeasured_hops`` are
    those that could not be asked any more, whose counts are what the answers prove."""

    sessions: Count
    hops: Count
    unmeasured_hops: Count
    prefill_tokens: Count
    decode_tokens: Count
    layer_tokens: Count
    bytes_in: Count
    bytes_out: Count
    compute_us: Count


class LedgerLine(LedgerCounts):
    """One line of a summary; of node, model and day (UTC) those are set that it was asked by."""

    node: str | None = None
    model: str | None = None
    day: str | None = None


class LedgerSummary(Noun):
    """The ledger over the period ``[since, until)``; ``since_unix_s`` None is from the beginning."""

    by: tuple[str, ...]
    since_unix_s: int | None
    until_unix_s: int
    lines: tuple[LedgerLine, ...]
    total: LedgerCounts


class ServedModels(Noun):
    """Models that a complete route serves now."""

    models: tuple[ServedModel, ...]


class PublishedArtifact(Noun):
    """What the tracker knows of a published artifact, beside its manifest and torrent.

    ``info_hash`` names its swarm; ``earlier_info_hashes`` those that it had under other file names, last first. Peers
    are those of all of them now; complete ones have every byte.
    """

    digest: ArtifactDigest
    name: Name
    architecture: Name
    n_layer: Count
    size_bytes: Count
    n_files: Count
    info_hash: InfoHash
    earlier_info_hashes: Annotated[tuple[InfoHash, ...], Field(max_length=MAX_EARLIER_SWARMS)] = ()
    published_unix_s: Count
    peers: Count = 0
    complete_peers: Count = 0


class PublishedArtifacts(Noun):
    """Everything published, by name."""

    artifacts: tuple[PublishedArtifact, ...]


class ShardStatus(Noun):
    """One advertised shard. ``open_sessions`` is the tracker's own count, ``load`` the worker's last report."""

    shard_id: str
    address: str
    model: str
    artifact_digest: Digest
    layers: LayerRange
    n_layer: int
    engine: str
    build_id: str
    session_slots: int
    session_capacity_tokens: int
    open_sessions: int
    load: ShardLoad
    #: Whether sessions may use it; if not, why.
    ready: bool = True
    why_not_ready: str | None = None
    pull_ms: int | None = None
    load_ms: int | None = None


class NodeStatus(Noun):
    """One known node. ``state`` is ``live``, ``lost`` (stopped reporting) or ``left`` (said goodbye)."""

    node_id: str
    state: str
    lease_epoch: int
    version: str
    last_seen_unix_s: float
    shards: tuple[ShardStatus, ...]
    capacity: NodeCapacity | None = None
    activities: tuple[Activity, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    links: tuple[LinkMeasure, ...] = ()


class ModelCoverage(Noun):
    """Whether an artifact can be served now, and if not, why. ``gaps`` are layers that no ready shard holds."""

    model: str
    artifact_digest: Digest
    n_layer: int
    routable: bool
    reason: str | None
    gaps: tuple[LayerRange, ...]


class TrackerStatus(Noun):
    """What ``meshnet status`` shows. Session ids are capabilities, so only counts are told."""

    version: str
    nodes: tuple[NodeStatus, ...]
    models: tuple[ModelCoverage, ...]
    open_sessions: int
    closed_sessions: int


def parse(model: type[N], body: bytes) -> N:
    """Read one message.

    Raises:
        RequestError: not JSON, a field missing, or of a wrong type or value; the message names each.
    """
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:5])
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        first = ".".join(map(str, faults[0]["loc"])) or None
        raise RequestError(f"{model.__name__} is not valid: {told}{more}", param=first) from None
