"""What makes a node the same node after a restart: its id, in a directory that one agent holds at a time."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from meshnet.artifact.store import store_root
from meshnet.errors import UsageError
from meshnet.tracker.app import NODE_ID
from meshnet.tracker.exclusive import only_process

#: Agents of one machine that share the store; more than anyone runs on purpose.
MAX_AGENTS = 100


@contextmanager
def node_identity(state_dir: Path | None = None) -> Iterator[str]:
    """The node id kept in ``state_dir``, made at the first use, and held while the block runs.

    Without ``state_dir`` it is the first of ``<store>/nodes/1``, ``2``, … that no running agent holds, so that several
    agents on one machine are several nodes and each is the same node again after a restart.

    Raises:
        UsageError: another agent holds ``state_dir``, or its contents are damaged or cannot be written.
        StoreError: there is no usable store.
    """
    with ExitStack() as held:
        if state_dir is None:
            state_dir = _first_free(store_root() / "nodes", held)
        else:
            held.enter_context(_only_agent(state_dir))
        yield _read_or_make(state_dir / "node.json")


def _only_agent(state_dir: Path) -> AbstractContextManager[None]:
    return only_process(
        state_dir / "agent.lock",
        otherwise=f"another node agent is running on {state_dir}; give this one its own --state-dir",
    )


def _first_free(nodes: Path, held: ExitStack) -> Path:
    refusal: UsageError | None = None
    for number in range(1, MAX_AGENTS + 1):
        directory = nodes / str(number)
        try:
            held.enter_context(_only_agent(directory))
        except UsageError as error:
            refusal = error
            continue
        return directory
    raise UsageError(f"no free node state under {nodes}: {refusal}")


def _read_or_make(path: Path) -> str:
    try:
        node_id = json.loads(path.read_text())["node_id"]
    except FileNotFoundError:
        node_id = _new_node_id()
        _write(path, {"node_id": node_id})
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error!r}); delete it to become a new node") from error
    if not isinstance(node_id, str) or not re.fullmatch(NODE_ID, node_id):
        raise UsageError(f"{path} holds no valid node id; delete it to become a new node")
    return node_id


def _new_node_id() -> str:
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:40]
    return f"{host or 'node'}-{secrets.token_hex(4)}"


def _write(path: Path, value: dict[str, str]) -> None:
    # Whole or not at all: a half-written id would make a new node of this machine.
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
