from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_F32: _ClassVar[DType]
    DTYPE_F16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_I32: _ClassVar[DType]

class Refusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[Refusal]
    REFUSAL_BAD_REQUEST: _ClassVar[Refusal]
    REFUSAL_BAD_TICKET: _ClassVar[Refusal]
    REFUSAL_WRONG_ARTIFACT: _ClassVar[Refusal]
    REFUSAL_WRONG_BUILD: _ClassVar[Refusal]
    REFUSAL_WRONG_LAYERS: _ClassVar[Refusal]
    REFUSAL_INCOMPATIBLE_BOUNDARY: _ClassVar[Refusal]
    REFUSAL_NO_CAPACITY: _ClassVar[Refusal]
    REFUSAL_TOO_LONG: _ClassVar[Refusal]
    REFUSAL_STALE_EPOCH: _ClassVar[Refusal]
    REFUSAL_UNKNOWN_SESSION: _ClassVar[Refusal]
    REFUSAL_PREFIX_MISMATCH: _ClassVar[Refusal]
    REFUSAL_DRAINING: _ClassVar[Refusal]
    REFUSAL_PEER_LOST: _ClassVar[Refusal]
    REFUSAL_ENGINE_FAILURE: _ClassVar[Refusal]
    REFUSAL_FLOW_CONTROL: _ClassVar[Refusal]
    REFUSAL_NO_ROLLBACK: _ClassVar[Refusal]
    REFUSAL_CANCELLED: _ClassVar[Refusal]

class FinishCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[FinishCause]
    FINISH_EOG: _ClassVar[FinishCause]
    FINISH_LENGTH: _ClassVar[FinishCause]
    FINISH_CAPACITY: _ClassVar[FinishCause]
    FINISH_STOP_TOKEN: _ClassVar[FinishCause]
DTYPE_UNSPECIFIED: DType
DTYPE_F32: DType
DTYPE_F16: DType
DTYPE_BF16: DType
DTYPE_I32: DType
REFUSAL_UNSPECIFIED: Refusal
REFUSAL_BAD_REQUEST: Refusal
REFUSAL_BAD_TICKET: Refusal
REFUSAL_WRONG_ARTIFACT: Refusal
REFUSAL_WRONG_BUILD: Refusal
REFUSAL_WRONG_LAYERS: Refusal
REFUSAL_INCOMPATIBLE_BOUNDARY: Refusal
REFUSAL_NO_CAPACITY: Refusal
REFUSAL_TOO_LONG: Refusal
REFUSAL_STALE_EPOCH: Refusal
REFUSAL_UNKNOWN_SESSION: Refusal
REFUSAL_PREFIX_MISMATCH: Refusal
REFUSAL_DRAINING: Refusal
REFUSAL_PEER_LOST: Refusal
REFUSAL_ENGINE_FAILURE: Refusal
REFUSAL_FLOW_CONTROL: Refusal
REFUSAL_NO_ROLLBACK: Refusal
REFUSAL_CANCELLED: Refusal
FINISH_UNSPECIFIED: FinishCause
FINISH_EOG: FinishCause
FINISH_LENGTH: FinishCause
FINISH_CAPACITY: FinishCause
FINISH_STOP_TOKEN: FinishCause

class LayerRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class BoundarySchema(_message.Message):
    __slots__ = ("tensors", "digest")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    digest: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("shard_id", "artifact_digest", "architecture", "model_name", "n_layer", "n_vocab", "n_ctx_train", "layers", "boundary_in", "boundary_out", "needs_token_ids", "legal_cuts", "session_capacity_tokens", "session_slots", "kv_bytes_per_token", "weight_bytes", "kv_bytes", "compute_bytes", "compatibility_id", "build_id", "engine", "max_step_tokens", "chat_template", "bos_token", "eos_token", "add_bos", "can_rollback", "chunk_tokens", "cut_boundaries")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    N_LAYER_FIELD_NUMBER: _ClassVar[int]
    N_VOCAB_FIELD_NUMBER: _ClassVar[int]
    N_CTX_TRAIN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_IN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_OUT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LEGAL_CUTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_ID_FIELD_NUMBER: _ClassVar[int]
    BUILD_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    CAN_ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CUT_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    shard_id: str
    artifact_digest: str
    architecture: str
    model_name: str
    n_layer: int
    n_vocab: int
    n_ctx_train: int
    layers: LayerRange
    boundary_in: BoundarySchema
    boundary_out: BoundarySchema
    needs_token_ids: bool
    legal_cuts: _containers.RepeatedScalarFieldContainer[int]
    session_capacity_tokens: int
    session_slots: int
    kv_bytes_per_token: int
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    compatibility_id: str
    build_id: str
    engine: str
    max_step_tokens: int
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    can_rollback: bool
    chunk_tokens: int
    cut_boundaries: _containers.RepeatedCompositeFieldContainer[BoundarySchema]
    def __init__(self, shard_id: _Optional[str] = ..., artifact_digest: _Optional[str] = ..., architecture: _Optional[str] = ..., model_name: _Optional[str] = ..., n_layer: _Optional[int] = ..., n_vocab: _Optional[int] = ..., n_ctx_train: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., boundary_in: _Optional[_Union[BoundarySchema, _Mapping]] = ..., boundary_out: _Optional[_Union[BoundarySchema, _Mapping]] = ..., needs_token_ids: _Optional[bool] = ..., legal_cuts: _Optional[_Iterable[int]] = ..., session_capacity_tokens: _Optional[int] = ..., session_slots: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., compute_bytes: _Optional[int] = ..., compatibility_id: _Optional[str] = ..., build_id: _Optional[str] = ..., engine: _Optional[str] = ..., max_step_tokens: _Optional[int] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., add_bos: _Optional[bool] = ..., can_rollback: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ..., cut_boundaries: _Optional[_Iterable[_Union[BoundarySchema, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("padding",)
    PADDING_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    def __init__(self, padding: _Optional[bytes] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("open_sessions", "session_slots", "kv_tokens", "queued_frames", "draining", "prefill_tokens", "prefill_compute_us", "decode_tokens", "decode_compute_us", "refused_frames", "resident_bytes")
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    open_sessions: int
    session_slots: int
    kv_tokens: int
    queued_frames: int
    draining: bool
    prefill_tokens: int
    prefill_compute_us: int
    decode_tokens: int
    decode_compute_us: int
    refused_frames: int
    resident_bytes: int
    def __init__(self, open_sessions: _Optional[int] = ..., session_slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., queued_frames: _Optional[int] = ..., draining: _Optional[bool] = ..., prefill_tokens: _Optional[int] = ..., prefill_compute_us: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., decode_compute_us: _Optional[int] = ..., refused_frames: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("session_id", "epoch", "expires_unix_s", "mac")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    expires_unix_s: int
    mac: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., expires_unix_s: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class RefusalDetail(_message.Message):
    __slots__ = ("refusal", "message", "requested", "limit")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    message: str
    requested: int
    limit: int
    def __init__(self, refusal: _Optional[_Union[Refusal, str]] = ..., message: _Optional[str] = ..., requested: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("shard_id", "address")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    shard_id: str
    address: str
    def __init__(self, shard_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("ticket", "hop_index", "n_hops", "layers", "artifact_digest", "compatibility_id", "boundary_in_digest", "boundary_out_digest", "token_capacity", "next", "head", "idle_timeout_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    N_HOPS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_IN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_OUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    hop_index: int
    n_hops: int
    layers: LayerRange
    artifact_digest: str
    compatibility_id: str
    boundary_in_digest: str
    boundary_out_digest: str
    token_capacity: int
    next: Peer
    head: Peer
    idle_timeout_s: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., hop_index: _Optional[int] = ..., n_hops: _Optional[int] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., artifact_digest: _Optional[str] = ..., compatibility_id: _Optional[str] = ..., boundary_in_digest: _Optional[str] = ..., boundary_out_digest: _Optional[str] = ..., token_capacity: _Optional[int] = ..., next: _Optional[_Union[Peer, _Mapping]] = ..., head: _Optional[_Union[Peer, _Mapping]] = ..., idle_timeout_s: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("cached_tokens", "prefix_hash", "ended")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    prefix_hash: int
    ended: HopStats
    def __init__(self, cached_tokens: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., ended: _Optional[_Union[HopStats, _Mapping]] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("known", "stats")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    stats: HopStats
    def __init__(self, known: _Optional[bool] = ..., stats: _Optional[_Union[HopStats, _Mapping]] = ...) -> None: ...

class HopStats(_message.Message):
    __slots__ = ("hop_index", "shard_id", "layers", "queue_us", "compute_us", "network_us", "bytes_in", "bytes_out", "frames_in", "frames_out", "prefill_tokens", "decode_tokens", "sample_us")
    HOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    NETWORK_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_IN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_OUT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    hop_index: int
    shard_id: str
    layers: LayerRange
    queue_us: int
    compute_us: int
    network_us: int
    bytes_in: int
    bytes_out: int
    frames_in: int
    frames_out: int
    prefill_tokens: int
    decode_tokens: int
    sample_us: int
    def __init__(self, hop_index: _Optional[int] = ..., shard_id: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., network_us: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., frames_in: _Optional[int] = ..., frames_out: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "penalty_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    PENALTY_LAST_N_FIELD_NUMBER: _ClassVar[int]
    REPEAT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    penalty_last_n: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., penalty_last_n: _Optional[int] = ..., repeat_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("ticket", "tokens", "cached_tokens", "prefix_hash", "sampling", "max_new_tokens", "ignore_eog", "stop_tokens", "chunk_tokens", "step_timeout_ms", "replayed_tokens", "resume_at")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOG_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    tokens: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    prefix_hash: int
    sampling: SamplingParams
    max_new_tokens: int
    ignore_eog: bool
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: int
    step_timeout_ms: int
    replayed_tokens: int
    resume_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., ignore_eog: _Optional[bool] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[int] = ..., step_timeout_ms: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., resume_at: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "piece")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    piece: bytes
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., piece: _Optional[bytes] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("position", "token", "piece", "has_logprob", "logprob", "top", "is_eog")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    IS_EOG_FIELD_NUMBER: _ClassVar[int]
    position: int
    token: int
    piece: bytes
    has_logprob: bool
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    is_eog: bool
    def __init__(self, position: _Optional[int] = ..., token: _Optional[int] = ..., piece: _Optional[bytes] = ..., has_logprob: _Optional[bool] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., is_eog: _Optional[bool] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("cause", "generated_tokens", "prefill_us", "decode_us")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    cause: FinishCause
    generated_tokens: int
    prefill_us: int
    decode_us: int
    def __init__(self, cause: _Optional[_Union[FinishCause, str]] = ..., generated_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("refusal", "message", "hop_index", "shard_id")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    message: str
    hop_index: int
    shard_id: str
    def __init__(self, refusal: _Optional[_Union[Refusal, str]] = ..., message: _Optional[str] = ..., hop_index: _Optional[int] = ..., shard_id: _Optional[str] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("token", "finished", "failed", "prefill")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    token: GeneratedToken
    finished: Finished
    failed: Failed
    prefill: PrefillProgress
    def __init__(self, token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prefill: _Optional[_Union[PrefillProgress, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("done_tokens", "total_tokens")
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    done_tokens: int
    total_tokens: int
    def __init__(self, done_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SeamFrame(_message.Message):
    __slots__ = ("frame_no", "session_id", "epoch", "step", "sampled", "failure", "end")
    FRAME_NO_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    frame_no: int
    session_id: bytes
    epoch: int
    step: StepFrame
    sampled: SampledFrame
    failure: FailureFrame
    end: EndFrame
    def __init__(self, frame_no: _Optional[int] = ..., session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., step: _Optional[_Union[StepFrame, _Mapping]] = ..., sampled: _Optional[_Union[SampledFrame, _Mapping]] = ..., failure: _Optional[_Union[FailureFrame, _Mapping]] = ..., end: _Optional[_Union[EndFrame, _Mapping]] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("position", "tokens", "prefix_hash", "boundary", "sample_at", "rollback", "prefill", "sampling", "step_timeout_ms", "resume_at")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prefix_hash: int
    boundary: _containers.RepeatedCompositeFieldContainer[Tensor]
    sample_at: _containers.RepeatedScalarFieldContainer[int]
    rollback: bool
    prefill: bool
    sampling: SamplingParams
    step_timeout_ms: int
    resume_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prefix_hash: _Optional[int] = ..., boundary: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., sample_at: _Optional[_Iterable[int]] = ..., rollback: _Optional[bool] = ..., prefill: _Optional[bool] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., step_timeout_ms: _Optional[int] = ..., resume_at: _Optional[_Iterable[int]] = ...) -> None: ...

class EndFrame(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class SampledFrame(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ...) -> None: ...

class FailureFrame(_message.Message):
    __slots__ = ("refusal", "message", "hop_index", "shard_id")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    message: str
    hop_index: int
    shard_id: str
    def __init__(self, refusal: _Optional[_Union[Refusal, str]] = ..., message: _Optional[str] = ..., hop_index: _Optional[int] = ..., shard_id: _Optional[str] = ...) -> None: ...

class SeamCredits(_message.Message):
    __slots__ = ("credits",)
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: _containers.RepeatedCompositeFieldContainer[SeamCredit]
    def __init__(self, credits: _Optional[_Iterable[_Union[SeamCredit, _Mapping]]] = ...) -> None: ...

class SeamCredit(_message.Message):
    __slots__ = ("frame_no", "held_us", "refused")
    FRAME_NO_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    frame_no: int
    held_us: int
    refused: Refusal
    def __init__(self, frame_no: _Optional[int] = ..., held_us: _Optional[int] = ..., refused: _Optional[_Union[Refusal, str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("ticket", "text", "add_special", "parse_special")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    text: str
    add_special: bool
    parse_special: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., text: _Optional[str] = ..., add_special: _Optional[bool] = ..., parse_special: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ticket", "tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("pieces",)
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...
