"""What makes a node the same node after a restart: its id and key, in a directory that one agent holds at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from meshnet.artifact.store import store_root
from meshnet.errors import UsageError
from meshnet.node.identity import NodeIdentity, machine_of, make_key, node_id_of, read_key, write_private
from meshnet.tracker.exclusive import only_process
from meshnet.tracker.messages import NODE_ID

#: Agents of one machine that share the store; more than anyone runs on purpose.
MAX_AGENTS = 100


@contextmanager
def node_identity(state_dir: Path | None = None) -> Iterator[NodeIdentity]:
    """The identity kept in ``state_dir``, made at the first use, and held while the block runs.

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
        yield _read_or_make(state_dir)


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


def _read_or_make(state_dir: Path) -> NodeIdentity:
    # The key first: killed between the two, the next start makes the same id from it.
    key_file, id_file = state_dir / "node.key", state_dir / "node.json"
    node_id = _read_id(id_file)
    # An id without a key is from before there were keys. It is kept: the tracker knows the node by it.
    key = read_key(key_file) or make_key(key_file)
    if node_id is None:
        node_id = node_id_of(key)
        write_private(id_file, json.dumps({"node_id": node_id}).encode())
    return NodeIdentity(node_id=node_id, machine=machine_of(key_file), key=key)


def _read_id(path: Path) -> str | None:
    try:
        node_id = json.loads(path.read_text())["node_id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error!r}); delete it to become a new node") from error
    if not isinstance(node_id, str) or not re.fullmatch(NODE_ID, node_id):
        raise UsageError(f"{path} holds no valid node id; delete it to become a new node")
    return node_id
