"""Whether a node is who it says: challenges that are signed once, and the keys that sign them."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshnet.errors import IdentityRefused, LeaseLost
from meshnet.tracker.messages import Challenge, Registration, registration_text
from meshnet.tracker.nodes import Node

#: A node answers at once; slow lines and a busy machine included.
CHALLENGE_TTL_S = 30.0
#: Most challenges waiting for an answer; the oldest is forgotten beyond that, and its node asks again.
MAX_CHALLENGES = 10_000


@dataclass(frozen=True)
class _Issued:
    node_id: str
    until_s: float


class Challenges:
    """Challenges that nobody has answered yet. ``clock`` gives seconds that never jump."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: By nonce, oldest first.
        self._issued: OrderedDict[str, _Issued] = OrderedDict()

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, node_id: str) -> Challenge:
        """A nonce that this node may sign, once and soon."""
        now_s = self._clock()
        while self._issued and next(iter(self._issued.values())).until_s <= now_s:
            self._issued.popitem(last=False)
        if len(self._issued) >= MAX_CHALLENGES:
            self._issued.popitem(last=False)
        nonce = secrets.token_hex(32)
        self._issued[nonce] = _Issued(node_id, now_s + CHALLENGE_TTL_S)
        return Challenge(nonce=nonce)

    def check(self, node_id: str, registration: Registration) -> None:
        """Use up the challenge that ``registration`` answers.

        Raises:
            LeaseLost: the challenge is used, too old, another node's, or from before a restart; ask for a new one.
            IdentityRefused: the signature is not by the key that the registration names.
        """
        issued = self._issued.pop(registration.nonce, None)
        if issued is None or issued.node_id != node_id or issued.until_s <= self._clock():
            raise LeaseLost(
                f"node {node_id} answers a challenge that this tracker does not wait for (any more); register again",
                superseded=False,
            )
        text = registration_text(node_id, registration.instance, registration.machine, registration.nonce)
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(registration.public_key))
            key.verify(bytes.fromhex(registration.signature), text)
        except (InvalidSignature, ValueError) as error:
            raise IdentityRefused(
                f"the registration of node {node_id} is not signed by the key that it names"
            ) from error


def check_identity(known: Node, registration: Registration, *, silent_s: float | None, lease_ttl_s: float) -> None:
    """Whether who registers may be the node that is known by that id.

    ``silent_s`` is how long ago the node has reported, None if it has no good lease.

    Raises:
        IdentityRefused: the node has another key, or is running on another machine.
    """
    if known.public_key not in (None, registration.public_key):
        raise IdentityRefused(
            f"node {known.node_id} is known here with another key; restore its node.key, or delete node.json in "
            "the state directory to become a new node"
        )
    if silent_s is not None and known.machine not in (None, registration.machine):
        raise IdentityRefused(
            f"node {known.node_id} is running elsewhere (last seen {silent_s:.1f} s ago): its identity was copied, "
            "or has moved here while it still runs there. Stop it there and start this one "
            f"{lease_ttl_s:g} s later, or give this one a --state-dir of its own"
        )
