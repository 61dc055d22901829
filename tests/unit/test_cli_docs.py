"""Everything that a person can set is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from meshnet.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "operations.md").read_text()


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """All commands, those of groups as ``group command``."""
    found: dict[str, Any] = {}
    for name, command in getattr(group, "commands", {}).items():
        inner = commands_of(command, f"{prefix}{name} ")
        found |= inner or {f"{prefix}{name}": command}
    return found


COMMANDS = commands_of(typer.main.get_command(app))


def section(command: str) -> str:
    """The part of the guide about one command."""
    _, _, rest = GUIDE.partition(f"### `meshnet {command}`\n")
    return re.split(r"^###? ", rest, flags=re.MULTILINE)[0]


def test_there_are_commands() -> None:
    assert set(COMMANDS) == {
        "serve",
        "node",
        "chat",
        "status",
        "ledger",
        "plan",
        "measure",
        "demo",
        "doctor",
        *(f"artifact {name}" for name in ("create", "inspect", "list", "verify", "remove", "publish", "seed", "pull")),
    }


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_documented(command: str) -> None:
    text = section(command)
    assert text
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "option" and not parameter.hidden and parameter.name != "help":
            assert any(f"`{name}`" in text for name in parameter.opts), parameter.opts
            assert parameter.help or parameter.name in ("max_tokens", "temperature", "seed")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_no_option_is_made_up(command: str) -> None:
    known = {name for p in COMMANDS[command].params for name in (*p.opts, *p.secondary_opts)}
    assert set(re.findall(r"`(--[a-z-]+)", section(command))) <= known | {"--tracker", "--gateway-only"}


def test_every_environment_variable_is_documented() -> None:
    used = set()
    for package in ("cli", "node", "engines", "tracker", "artifact"):
        for path in (ROOT / "src" / "meshnet" / package).rglob("*.py"):
            used |= set(re.findall(r'"(MESHNET_[A-Z_]+)"', path.read_text()))
    # Between an agent and its worker; nobody sets it.
    used.remove("MESHNET_WORKER_KEY")
    assert used
    for name in used:
        assert name in GUIDE, name


def test_defaults_in_the_guide_are_those_of_the_code() -> None:
    from meshnet.node.settings import NodeSettings
    from meshnet.tracker.settings import TrackerSettings

    defaults = {p.name: p.default for p in COMMANDS["serve"].params}
    assert (defaults["heartbeat_s"], defaults["lease_ttl_s"], defaults["port"]) == (2.0, 6.0, 8080)
    assert (TrackerSettings().heartbeat_s, TrackerSettings().lease_ttl_s) == (2.0, 6.0)
    assert (defaults["session_lease_s"], TrackerSettings().session_lease_s) == (60.0, 60.0)
    assert (NodeSettings().restart_backoff_s, NodeSettings().restart_backoff_max_s) == (0.2, 30.0)
    assert (NodeSettings().status_timeout_s, NodeSettings().unanswered_limit) == (1.0, 2)
    for text in ("| `--heartbeat-s` | 2 |", "| `--lease-ttl-s` | 6 |", "after 0.2 s", "up to 30 s", "for 60 s"):
        assert text in GUIDE
