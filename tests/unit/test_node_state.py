"""The identity of a node across restarts."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from meshnet.errors import UsageError
from meshnet.node import identity
from meshnet.node.identity import NodeIdentity, public_bytes
from meshnet.node.state import node_identity
from meshnet.tracker.messages import NODE_ID, registration_text

ME = "a" * 32
NONCE = "b" * 64


def read(state_dir: Path | None = None) -> NodeIdentity:
    with node_identity(state_dir) as found:
        return found


def told(found: NodeIdentity) -> tuple[str, str, bytes]:
    return found.node_id, found.machine, public_bytes(found.key)


def test_an_identity_is_kept(tmp_path: Path) -> None:
    first = read(tmp_path / "n")
    assert told(read(tmp_path / "n")) == told(first)
    assert re.fullmatch(NODE_ID, first.node_id)
    assert told(read(tmp_path / "other"))[0] != first.node_id


def test_the_key_is_private_and_written_whole(tmp_path: Path) -> None:
    read(tmp_path)
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.lock", "node.json", "node.key"]


def test_a_start_that_was_killed_half_way_ends_the_same(tmp_path: Path) -> None:
    first = read(tmp_path)
    (tmp_path / "node.json").unlink()
    assert told(read(tmp_path)) == told(first)


def test_an_id_from_before_there_were_keys_is_kept(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"node_id": "old-0123abcd"}')
    first = read(tmp_path)
    assert first.node_id == "old-0123abcd"
    assert told(read(tmp_path)) == told(first)


def test_a_registration_is_signed(tmp_path: Path) -> None:
    node = read(tmp_path)
    registration = node.registration(ME, NONCE)
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(registration.public_key))
    text = registration_text(node.node_id, ME, node.machine, NONCE)
    key.verify(bytes.fromhex(registration.signature), text)
    assert (registration.instance, registration.machine, registration.nonce) == (ME, node.machine, NONCE)


def test_a_copy_is_another_machine(tmp_path: Path) -> None:
    original = read(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = read(tmp_path / "b")
    assert (copy.node_id, public_bytes(copy.key)) == (original.node_id, public_bytes(original.key))
    assert copy.machine != original.machine
    os.rename(tmp_path / "a", tmp_path / "c")
    assert read(tmp_path / "c").machine == original.machine


def test_a_snapshot_on_another_host_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [tmp_path / "host-1", tmp_path / "host-2"]
    machines = []
    for number, host in enumerate(hosts):
        host.write_text(f"{number:032x}\n")
        monkeypatch.setattr(identity, "MACHINE_ID_FILES", (tmp_path / "none", host))
        machines.append(read(tmp_path / "n").machine)
    assert machines[0] != machines[1]


def test_a_system_without_an_id_of_its_own_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("uninitialized\n")
    monkeypatch.setattr(identity, "MACHINE_ID_FILES", (tmp_path / "none", tmp_path / "empty"))
    assert read(tmp_path / "n").machine == read(tmp_path / "n").machine


def test_a_held_directory_is_refused(tmp_path: Path) -> None:
    held = node_identity(tmp_path)
    with held, pytest.raises(UsageError, match=r"another node agent is running on .*--state-dir"):
        node_identity(tmp_path).__enter__()


def test_agents_of_one_machine_are_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    with node_identity() as first, node_identity() as second:
        assert first.node_id != second.node_id
    assert told(read()) == told(first)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"node_id": 7}', '{"node_id": "../x"}', "\x00"])
def test_a_damaged_id_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(UsageError, match=r"node\.json"):
        read(tmp_path)


def rsa_key() -> bytes:
    key = generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda key: b"", "is damaged"),
        (lambda key: key[:-40], "is damaged"),
        (lambda key: bytes(len(key)), "is damaged"),
        (lambda key: rsa_key(), "is no Ed25519 key"),
    ],
)
def test_a_damaged_key_is_told_and_left_alone(tmp_path: Path, damage: object, said: str) -> None:
    read(tmp_path)
    key_file = tmp_path / "node.key"
    damaged = damage(key_file.read_bytes())  # type: ignore[operator]
    key_file.write_bytes(damaged)
    with pytest.raises(UsageError, match=rf"node\.key {said}.*to become a new node"):
        read(tmp_path)
    assert key_file.read_bytes() == damaged


def test_an_unwritable_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        read(tmp_path / "file")
    (tmp_path / "n" / "node.key").mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot read the node's key"):
        read(tmp_path / "n")
