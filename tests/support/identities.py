"""Nodes that register without a state directory."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.node.identity import NodeIdentity
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.messages import Lease
from meshnet.tracker.registry import Registry

MACHINE = "1" * 64
OTHER_MACHINE = "2" * 64


def make_identity(node_id: str, *, machine: str = MACHINE, key: str = "") -> NodeIdentity:
    """Always the same for the same arguments; ``key`` names a key other than the node's own."""
    seed = hashlib.sha256((key or node_id).encode()).digest()
    return NodeIdentity(node_id=node_id, machine=machine, key=Ed25519PrivateKey.from_private_bytes(seed))


async def register(registry: Registry, instance: str, node: NodeIdentity | str) -> Lease:
    """Register as an agent does; a node given by its id only has the key that `make_identity` gives it."""
    identity = make_identity(node) if isinstance(node, str) else node
    nonce = registry.challenge(identity.node_id).nonce
    return await registry.register(identity.node_id, identity.registration(instance, nonce))


async def register_at(client: TrackerClient, instance: str, node: NodeIdentity | str) -> Lease:
    """The same over HTTP."""
    identity = make_identity(node) if isinstance(node, str) else node
    nonce = (await client.challenge(identity.node_id)).nonce
    return await client.register(identity.node_id, identity.registration(instance, nonce))
