"""One probe: a few tokens through a route, over the same calls that a gateway makes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshnet.core import Route, Shard, Ticket
from meshnet.errors import HopLost, HopRefused
from meshnet.rpc.client import GenerateCall, WorkerClient, WorkerPool, refusal_name
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket
from meshnet.tracker.answers import CLOSE, Answer, Said
from meshnet.tracker.probe_routes import ANSWER_TOKENS, PROBE_TOKENS, PROMPT_TOKENS

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
TICKET_TTL_S = 300

#: Refusals that say nothing against the hop: it is full, or about to go.
BUSY = frozenset({"REFUSAL_NO_CAPACITY", "REFUSAL_DRAINING"})


class HopBusy(Exception):
    """A hop has no room for a probe now."""

    def __init__(self, shard_id: str) -> None:
        super().__init__(shard_id)
        self.shard_id = shard_id


class HopAtFault(Exception):
    """A hop did not do its part; the message says what."""

    def __init__(self, shard_id: str, reason: str) -> None:
        super().__init__(reason)
        self.shard_id = shard_id


@dataclass(frozen=True)
class _Hop:
    shard: Shard
    ticket: Ticket
    worker: WorkerClient


async def run_probe(
    pool: WorkerPool, route: Route, worker_keys: Mapping[str, str], *, n_vocab: int, timeout_s: float
) -> Answer:
    """Send the probe's prompt through ``route`` and return what comes back. The session is closed in any case.

    ``worker_keys`` are those of the shards, in hex. ``timeout_s`` is for all of the computing.

    Raises:
        HopBusy, HopAtFault: of the hop that is the cause.
    """
    session_id = secrets.token_hex(16)
    expires_unix_s = int(time.time()) + TICKET_TTL_S
    hops = [
        _Hop(
            shard,
            make_ticket(bytes.fromhex(worker_keys[shard.shard_id]), session_id, 1, shard.shard_id, expires_unix_s),
            pool.worker(shard.address, shard_id=shard.shard_id, hop_index=index),
        )
        for index, shard in enumerate(route.shards)
    ]
    try:
        await _open(hops)
        return await _generate(hops, n_vocab, timeout_s)
    except HopRefused as error:
        raise (HopBusy(error.shard_id) if error.refusal in BUSY else HopAtFault(error.shard_id, str(error))) from error
    except HopLost as error:
        raise HopAtFault(error.shard_id, str(error)) from error
    finally:
        await asyncio.gather(*(_close(hop) for hop in hops))


async def _open(hops: Sequence[_Hop]) -> None:
    opening = [hop.worker.open(_open_request(hops, index), timeout_s=OPEN_TIMEOUT_S) for index, hop in enumerate(hops)]
    # All of them, whatever one says: a Close must not overtake an Open.
    for opened in await asyncio.gather(*opening, return_exceptions=True):
        if isinstance(opened, BaseException):
            raise opened


def _open_request(hops: Sequence[_Hop], index: int) -> pb.OpenRequest:
    hop = hops[index]
    following = hops[index + 1].shard if index + 1 < len(hops) else None
    return pb.OpenRequest(
        ticket=ticket_to_message(hop.ticket),
        hop_index=index,
        n_hops=len(hops),
        layers=layers_to_message(hop.shard.layers),
        artifact_digest=hop.shard.artifact_digest,
        compatibility_id=hop.shard.compatibility_id,
        boundary_in_digest=hop.shard.boundary_in.digest,
        boundary_out_digest=hop.shard.boundary_out.digest,
        token_capacity=PROBE_TOKENS,
        next=_peer(following) if following else None,
        head=_peer(hops[0].shard),
    )


async def _generate(hops: Sequence[_Hop], n_vocab: int, timeout_s: float) -> Answer:
    head = hops[0]
    call = head.worker.generate(
        pb.GenerateRequest(
            ticket=ticket_to_message(head.ticket),
            tokens=[n_vocab * part // (PROMPT_TOKENS + 1) for part in range(1, PROMPT_TOKENS + 1)],
            sampling=pb.SamplingParams(logprobs=3),
            max_new_tokens=ANSWER_TOKENS,
            ignore_eog=True,
            # Half: a hop that hangs is reported by the one before it while somebody still listens.
            step_timeout_ms=round(timeout_s * 500),
        )
    )
    try:
        return await _read(call, hops, time.monotonic() + timeout_s)
    finally:
        call.cancel()


async def _read(call: GenerateCall, hops: Sequence[_Hop], deadline_s: float) -> Answer:
    head = hops[0].shard.shard_id
    said: list[Said] = []
    while True:
        event = await call.read(timeout_s=max(0.0, deadline_s - time.monotonic()))
        kind = event.WhichOneof("event") if event is not None else None
        if event is None:
            raise HopAtFault(head, "ended the probe without saying why")
        if kind == "token":
            said.append(_said(event.token))
        elif kind == "failed":
            raise _failure(event.failed, hops)
        elif kind == "finished":
            break
    if len(said) != ANSWER_TOKENS:
        raise HopAtFault(head, f"gave {len(said)} tokens for a probe of {ANSWER_TOKENS}")
    return Answer(said=tuple(said))


def _said(token: pb.GeneratedToken) -> Said:
    close = [other.token for other in token.top if other.token != token.token and token.logprob - other.logprob < CLOSE]
    return Said(token=token.token, runner_up=close[0] if close else None)


def _failure(failed: pb.Failed, hops: Sequence[_Hop]) -> HopAtFault | HopBusy:
    at_fault = hops[failed.hop_index] if failed.hop_index < len(hops) else hops[0]
    refusal = refusal_name(failed.refusal)
    if refusal in BUSY:
        return HopBusy(at_fault.shard.shard_id)
    return HopAtFault(at_fault.shard.shard_id, f"{at_fault.worker} failed a probe: {failed.message or refusal}")


async def _close(hop: _Hop) -> None:
    try:
        await hop.worker.close(hop.ticket, timeout_s=CLOSE_TIMEOUT_S)
    except (HopLost, HopRefused) as error:
        # It frees the session by itself.
        log.info("could not close a probe: %s", error)


def _peer(shard: Shard) -> pb.Peer:
    return pb.Peer(shard_id=shard.shard_id, address=shard.address)
