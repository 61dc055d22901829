"""The identity of a node across restarts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshnet.errors import UsageError
from meshnet.node.state import node_identity
from meshnet.tracker.app import NODE_ID


def test_an_identity_is_kept(tmp_path: Path) -> None:
    with node_identity(tmp_path / "n") as first:
        pass
    with node_identity(tmp_path / "n") as second:
        pass
    assert first == second
    assert re.fullmatch(NODE_ID, first)


def test_a_held_directory_is_refused(tmp_path: Path) -> None:
    held = node_identity(tmp_path)
    with held, pytest.raises(UsageError, match=r"another node agent is running on .*--state-dir"):
        node_identity(tmp_path).__enter__()


def test_agents_of_one_machine_are_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    with node_identity() as first, node_identity() as second:
        assert first != second
    with node_identity() as again:
        assert again == first


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"node_id": 7}', '{"node_id": "../x"}', "\x00"])
def test_a_damaged_identity_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(UsageError, match=r"node\.json"), node_identity(tmp_path):
        pass


def test_an_unwritable_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"), node_identity(tmp_path / "file"):
        pass
