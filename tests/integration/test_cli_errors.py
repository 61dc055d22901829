"""What goes wrong at the command line: one line that says what to do, exit code 2, no traceback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command import Ran, environment, run

SECRETS = {"MESHNET_API_KEY": "sk-0123456789", "MESHNET_JOIN_TOKEN": "join-0123456789"}
NOBODY = "http://127.0.0.1:1"


def told(ran: Ran) -> str:
    """The one line of an error."""
    assert ran.code == 2, ran
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    return line


CASES: list[tuple[Sequence[str], str]] = [
    (["--log-level", "loud", "doctor"], "meshnet: log level 'loud' is not one of debug, info, warning, error"),
    (
        ["serve", "--tracker-only", "--gateway-only"],
        "meshnet: --tracker-only and --gateway-only exclude each other; leave both out to serve both",
    ),
    (["serve", "--gateway-only"], "meshnet: --gateway-only needs --tracker URL"),
    (
        ["serve", "--gateway-only", "--tracker", NOBODY, "--state-dir", "x"],
        "meshnet: --state-dir and --database are the tracker's; a gateway alone keeps nothing",
    ),
    (
        ["serve", "--tracker", NOBODY],
        "meshnet: --tracker goes with --gateway-only; without it, serve runs its own tracker",
    ),
    (
        ["serve", "--gateway-only", "--port", "0", "--tracker", "mesh"],
        "meshnet: 'mesh' is not a URL of a tracker or gateway; write http://HOST:PORT",
    ),
    (["serve", "--port", "0", "--host", "nowhere.invalid"], "meshnet: --host nowhere.invalid is no address"),
    (["serve", "--port", "0", "--host", "192.0.2.1"], "meshnet: cannot listen on 192.0.2.1 port 0: Cannot assign"),
    (["serve", "--port", "0", "--database", "mysql"], "meshnet: cannot use database 'mysql': "),
    (["serve", "--port", "0", "--lease-ttl-s", "1"], "meshnet: lease_ttl_s is 1, less than two heartbeats of 2 s"),
    (["serve", "--port", "0", "--state-dir", "/proc/x"], "meshnet: cannot write /proc/x/tracker.lock: "),
    (["node", "--model", "/nowhere.gguf", "--layers", "0:15"], "meshnet: /nowhere.gguf"),
    (
        ["node", "--model", "m", "--layers", "15"],
        "meshnet: --layers 15: layer range '15' is not START:END, for example",
    ),
    (
        ["node", "--model", "m", "--layers", "9:3"],
        "meshnet: --layers 9:3: layer range 9:3 is empty; write START:END with START < END",
    ),
    (
        ["node", "--model", "m", "--layers", "9:0"],
        "meshnet: --layers 9:0: layer range 9:0 is empty; write START:END with START < END",
    ),
    (
        ["node", "--model", "m", "--layers", "all", "--model-name", "a b"],
        "meshnet: --model-name 'a b' is no name: write up to 200 letters, digits and",
    ),
    (
        ["node", "--model", "m", "--layers", "0:1", "--layers", "1:2", "--listen", "127.0.0.1:7000"],
        "meshnet: --listen 127.0.0.1:7000 is one port for 2 workers; use port 0, or one node per range",
    ),
    (
        ["node", "--model", "m", "--layers", "all", "--listen", "7000"],
        "meshnet: --listen '7000' is not HOST:PORT, for example 192.0.2.7:7000",
    ),
    (["node", "--model", "m"], "meshnet: --model goes with --layers; without --layers the tracker chooses what"),
    (["node", "--artifact", "m", "--context", "512"], "meshnet: --context goes with --layers; without --layers"),
    (["node", "--memory", "much"], "meshnet: --memory 'much' is no size; write for example 4GB"),
    (["node", "--listen", "127.0.0.1:7000"], "meshnet: --listen 127.0.0.1:7000 is one port for any number of workers"),
    (
        ["node", "--model", "m", "--layers", "all", "--memory", "4GB"],
        "meshnet: --memory and --disk are lent to the tracker; with --layers the node takes what these need",
    ),
    (["serve", "--port", "0", "--deploy", "m:layers=3"], "meshnet: --deploy 'm:layers=3': there is no layers; write"),
    (["node", "--model", "m", "--layers", "all", "--tracker", "mesh"], "meshnet: 'mesh' is not a URL of a tracker"),
    (["chat", "hi", "--url", NOBODY], "meshnet: no answer from http://127.0.0.1:1 ("),
    (["chat", "hi", "-m", "x", "--url", "mesh"], "meshnet: 'mesh' is not a URL of a tracker or gateway"),
    (["status", "--tracker", NOBODY], "meshnet: no answer from the tracker at http://127.0.0.1:1 ("),
    (
        ["status", "--join-token", "short"],
        "meshnet: the secret from --join-token must be 8 to 200 printable ASCII characters without spaces",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), CASES, ids=[" ".join(case[0])[:60] for case in CASES])
async def test_usage_errors_are_one_line(tmp_path: Path, arguments: Sequence[str], expected: str) -> None:
    assert told(await run(*arguments, env=environment(tmp_path, **SECRETS))).startswith(expected)


async def test_without_secrets_commands_say_where_to_get_them(tmp_path: Path) -> None:
    env = environment(tmp_path)
    chat, status, node = await asyncio.gather(
        run("chat", "hi", env=env),
        run("status", env=env),
        run("node", "--model", "m", "--layers", "all", env=env),
    )
    where = f"or run `meshnet serve` on this machine first (looked in {tmp_path}/credentials.json)"
    assert told(chat) == f"meshnet: no API key: pass --api-key, set MESHNET_API_KEY, {where}"
    for ran in (status, node):
        assert told(ran) == f"meshnet: no join token: pass --join-token, set MESHNET_JOIN_TOKEN, {where}"


async def test_a_gateway_alone_does_not_invent_a_join_token(tmp_path: Path) -> None:
    ran = await run("serve", "--gateway-only", "--tracker", NOBODY, env=environment(tmp_path, MESHNET_API_KEY="x" * 8))
    assert told(ran).startswith("meshnet: no join token")


async def test_a_store_under_home_is_refused(tmp_path: Path) -> None:
    env = environment(Path("/home/someone/models"))
    for ran in await asyncio.gather(run("serve", "--port", "0", env=env), run("demo", "--engine", "test", env=env)):
        assert "under /home" in told(ran)


async def test_a_missing_worker_is_named(tmp_path: Path) -> None:
    env = environment(tmp_path, **SECRETS, MESHNET_WORKER=str(tmp_path / "none"))
    node, demo = await asyncio.gather(
        run("node", "--model", "m", "--layers", "all", env=env), run("demo", "--engine", "test", env=env)
    )
    for ran in (node, demo):
        assert told(ran) == f"meshnet: MESHNET_WORKER is {tmp_path}/none, which is not an executable file"
    doctor = await run("doctor", env=env)
    assert doctor.code == 1
    assert "fail  worker   MESHNET_WORKER is" in doctor.out


async def test_wrong_options_are_told_by_the_parser(tmp_path: Path) -> None:
    for arguments in (["serve", "--prot", "1"], ["node", "--layer", "all"], ["nonsense"], ["serve", "--port", "99999"]):
        ran = await run(*arguments, env=environment(tmp_path))
        assert ran.code == 2
        assert "Traceback" not in ran.err


async def test_a_healthy_machine_passes_the_doctor(tmp_path: Path) -> None:
    ran = await run("doctor", env=environment(tmp_path))
    assert ran.code == 0, ran
    levels = {line.split()[1]: line.split()[0] for line in ran.out.splitlines()}
    assert set(levels) == {"python", "worker", "store", "identity", "memory", "pages", "cores", "port"}
    assert levels["python"] == levels["worker"] == "ok"
    assert ", build " in ran.out


async def test_the_doctor_fails_on_a_tracker_that_does_not_answer(tmp_path: Path) -> None:
    ran = await run("doctor", "--tracker", NOBODY, env=environment(tmp_path, **SECRETS))
    assert ran.code == 1
    assert "fail  tracker  no answer from the tracker at http://127.0.0.1:1" in ran.out
