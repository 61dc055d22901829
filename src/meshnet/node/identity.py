"""Who a node is: an Ed25519 key pair, the id made from it, and the machine that both are on."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from meshnet.errors import UsageError
from meshnet.tracker.messages import VERSION, Registration, registration_text

#: Where systems keep an id of their own; the second is what containers without systemd may have.
MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


@dataclass(frozen=True)
class NodeIdentity:
    """What a node registers with. ``machine`` is a digest: equal after a restart, another for a copy of the key."""

    node_id: str
    machine: str
    key: Ed25519PrivateKey = field(repr=False)

    def registration(self, instance: str, nonce: str) -> Registration:
        """The answer to the tracker's challenge, signed. ``instance`` is this process's own."""
        text = registration_text(self.node_id, instance, self.machine, nonce)
        return Registration(
            instance=instance,
            version=VERSION,
            public_key=public_bytes(self.key).hex(),
            machine=self.machine,
            nonce=nonce,
            signature=self.key.sign(text).hex(),
        )


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The public half, raw: 32 bytes."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def node_id_of(key: Ed25519PrivateKey) -> str:
    """The id of a new node with this key: the host's name, and 8 digits that no other key is likely to have."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:40]
    return f"{host or 'node'}-{hashlib.sha256(public_bytes(key)).hexdigest()[:8]}"


def read_key(path: Path) -> Ed25519PrivateKey | None:
    """The key at ``path``, or None if there is no file.

    Raises:
        UsageError: it is damaged, of another kind, or cannot be read.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read the node's key {path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"the node's key {path} is damaged; {_what_to_do(path)}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"the node's key {path} is no Ed25519 key; {_what_to_do(path)}")
    return key


def make_key(path: Path) -> Ed25519PrivateKey:
    """A new key, written to ``path`` whole or not at all, readable by nobody else.

    Raises:
        UsageError: it cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        # The name must survive a power loss too: the tracker knows this key from now on.
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def machine_of(key_file: Path) -> str:
    """A digest that stays the same while ``key_file`` stays where it is, and differs for any copy of it.

    Raises:
        UsageError: there is no such file.
    """
    try:
        kept = key_file.stat()
    except OSError as error:
        raise UsageError(f"cannot read the node's key {key_file}: {error.strerror}") from error
    return hashlib.sha256(f"{_machine_id()}\n{kept.st_dev}\n{kept.st_ino}".encode()).hexdigest()


def _machine_id() -> str:
    for path in MACHINE_ID_FILES:
        try:
            told = path.read_text().strip()
        except (OSError, ValueError):
            continue
        # Empty or a word while the first boot is going on.
        if re.fullmatch(r"[0-9a-f]{32}", told):
            return told
    hardware = uuid.getnode()
    # Without a network card the number is made up anew in each process, and has this bit to say so.
    made_up = hardware >> 40 & 1
    return socket.gethostname() if made_up else f"{socket.gethostname()}\n{hardware:012x}"


def _what_to_do(path: Path) -> str:
    return f"restore it, or delete {path} and {path.with_name('node.json')} to become a new node"
