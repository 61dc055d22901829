"""Whether a worker says of itself what its node says of it."""

from __future__ import annotations

from meshnet.core import Shard
from meshnet.rpc.convert import shard_from_description
from meshnet.rpc.generated import shard_pb2 as pb


def disagreement(advertised: Shard, description: pb.DescribeResponse) -> str | None:
    """What ``advertised`` claims and its worker does not confirm; None if all is as it says."""
    try:
        worker = shard_from_description(description, advertised.address, model=advertised.model)
    except ValueError as error:
        return f"its worker's description is malformed: {error}"
    if worker.shard_id != advertised.shard_id:
        return f"another shard answers at {advertised.address}: {worker.shard_id}"
    for what, claimed, found in (
        ("layers", advertised.layers, worker.layers),
        ("artifact", advertised.artifact_digest, worker.artifact_digest),
        ("n_layer", advertised.n_layer, worker.n_layer),
        ("build", advertised.compatibility_id, worker.compatibility_id),
        ("boundary in", advertised.boundary_in.digest, worker.boundary_in.digest),
        ("boundary out", advertised.boundary_out.digest, worker.boundary_out.digest),
    ):
        if claimed != found:
            return f"advertises {what} {claimed} but its worker says {found}"
    for name in ("session_capacity_tokens", "session_slots", "max_step_tokens"):
        if getattr(advertised, name) > getattr(worker, name):
            return f"advertises {name} {getattr(advertised, name)} but its worker says {getattr(worker, name)}"
    legal = set(description.legal_cuts)
    beyond = [cut.layer for cut in advertised.cuts if cut.layer not in legal]
    if beyond:
        return f"advertises a cut at layer {beyond[0]} but its worker says {sorted(legal)}"
    return None
