"""Between wire messages and domain nouns. Whatever a worker says about itself is validated here, at the door."""

from __future__ import annotations

import re
from itertools import pairwise

from meshnet.core import Boundary, Cut, LayerRange, Shard, TensorSpec, Ticket
from meshnet.rpc.generated import shard_pb2 as pb

_DTYPES = {pb.DTYPE_F32: "f32", pb.DTYPE_F16: "f16", pb.DTYPE_BF16: "bf16", pb.DTYPE_I32: "i32"}


def shard_from_description(description: pb.DescribeResponse, address: str, *, model: str | None = None) -> Shard:
    """The ``Shard`` that the worker at ``address`` (host:port) serves.

    ``model`` is the name that clients will use; by default it is made from the model's own name (or else its
    architecture), with characters that a name cannot hold replaced by ``-``.

    Raises:
        ValueError: the description is malformed (``pydantic.ValidationError`` is a ``ValueError``).
    """
    layers = LayerRange(start=description.layers.start, end=description.layers.end)
    return Shard(
        shard_id=description.shard_id,
        address=address,
        model=model if model is not None else _as_name(description.model_name or description.architecture),
        artifact_digest=description.artifact_digest,
        architecture=description.architecture,
        n_layer=description.n_layer,
        layers=layers,
        boundary_in=boundary_from_schema(description.boundary_in),
        boundary_out=boundary_from_schema(description.boundary_out),
        compatibility_id=description.compatibility_id,
        build_id=description.build_id,
        engine=description.engine,
        n_ctx_train=description.n_ctx_train,
        session_capacity_tokens=description.session_capacity_tokens,
        session_slots=description.session_slots,
        max_step_tokens=description.max_step_tokens,
        weight_bytes=description.weight_bytes,
        kv_bytes=description.kv_bytes,
        compute_bytes=description.compute_bytes,
        kv_bytes_per_token=description.kv_bytes_per_token,
        cuts=_cuts(description, layers),
    )


def _cuts(description: pb.DescribeResponse, layers: LayerRange) -> tuple[Cut, ...]:
    # Without boundaries the worker serves its range as a whole: the legal cuts are then of no use to a session.
    if not description.cut_boundaries:
        return ()
    legal = tuple(description.legal_cuts)
    if len(legal) != len(description.cut_boundaries):
        raise ValueError(f"{len(legal)} legal cuts, but {len(description.cut_boundaries)} boundaries of them")
    if any(following <= cut for cut, following in pairwise((layers.start, *legal, layers.end))):
        raise ValueError(f"the legal cuts are not rising layers inside {layers}")
    return tuple(
        Cut(layer=layer, boundary=boundary_from_schema(boundary))
        for layer, boundary in zip(legal, description.cut_boundaries, strict=True)
    )


def boundary_from_schema(schema: pb.BoundarySchema) -> Boundary:
    """Read a wire schema.

    Raises:
        ValueError: an unknown dtype, an empty shape entry or a missing digest.
    """
    tensors = []
    for tensor in schema.tensors:
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"boundary tensor {tensor.name!r} has unknown dtype {tensor.dtype}")
        tensors.append(TensorSpec(name=tensor.name, dtype=dtype, shape=tuple(tensor.shape)))
    return Boundary(tensors=tuple(tensors), digest=schema.digest)


def layers_to_message(layers: LayerRange) -> pb.LayerRange:
    return pb.LayerRange(start=layers.start, end=layers.end)


def ticket_to_message(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
        session_id=bytes.fromhex(ticket.session_id),
        epoch=ticket.epoch,
        expires_unix_s=ticket.expires_unix_s,
        mac=bytes.fromhex(ticket.mac),
    )


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9:+._/@-]+", "-", text).strip("-+._/@:")[:200]
