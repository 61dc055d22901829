"""Sessions and the ledger over HTTP: repair, renewal, work; `meshnet ledger`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshnet.core import RouteSource
from meshnet.errors import NoRoute, RequestError, SessionLost
from meshnet.tracker.client import HttpRouteSource
from meshnet.tracker.database import sqlite_url
from meshnet.tracker.messages import MAX_RENEWED
from tests.support.command import environment, run
from tests.support.tracker_node import TOKEN, FakeNode, Served, finish, serving, shards, work

UNKNOWN = "0" * 32
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(sqlite_url(tmp_path / "tracker.sqlite3")) as opened:
        await FakeNode(shards=shards("0:3", "3:8", "3:8/b")).join(opened.client)
        yield opened


async def test_a_gateway_apart_repairs_and_renews(served: Served) -> None:
    source: RouteSource = served.client
    session = await source.open_session("tiny", avoid_shards=["3-8.b"], prompt_tokens=20, answer_tokens=30)
    repaired = await source.repair_session(session.session_id, epoch=1, lost_shards=["3-8"])
    assert (repaired.epoch, [shard.shard_id for shard in repaired.route.shards]) == (2, ["0-3", "3-8.b"])
    with pytest.raises(SessionLost, match="epoch 1 of this session is over; its last one is 2"):
        await source.repair_session(session.session_id, epoch=1, lost_shards=["3-8"])
    with pytest.raises(NoRoute, match="leaving out 0-3"):
        await source.repair_session(session.session_id, epoch=2, lost_shards=["0-3"])
    with pytest.raises(SessionLost, match="does not know"):
        await source.repair_session(UNKNOWN, epoch=1, lost_shards=[])
    assert await source.renew_sessions([session.session_id, UNKNOWN]) == (UNKNOWN,)


async def test_more_sessions_than_one_call_takes_are_renewed_in_several(served: Served) -> None:
    session = await served.client.open_session("tiny")
    unknown = [f"{number:032x}" for number in range(MAX_RENEWED + 5)]
    assert await served.client.renew_sessions([*unknown, session.session_id]) == tuple(unknown)
    assert await served.client.renew_sessions([]) == ()


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("sessions/renew", {}, "session_ids: Field required"),
        ("sessions/renew", {"session_ids": ["x"]}, "session_ids.0"),
        ("sessions/renew", {"session_ids": [UNKNOWN] * (MAX_RENEWED + 1)}, "session_ids"),
        (f"sessions/{UNKNOWN}/repair", {"epoch": 0, "lost_shards": []}, "epoch"),
        (f"sessions/{UNKNOWN}/repair", {"epoch": "1", "lost_shards": []}, "epoch"),
        (f"sessions/{UNKNOWN}/repair", {"epoch": 1}, "lost_shards: Field required"),
        (f"sessions/{UNKNOWN}/repair", {"epoch": 1, "lost_shards": ["../etc"]}, "lost_shards.0"),
        (f"sessions/{UNKNOWN}/end", {"finish_cause": "eog", "generated_tokens": -1}, "generated_tokens"),
        (f"sessions/{UNKNOWN}/end", {"finish_cause": "eog", "generated_tokens": 1, "work": [{}]}, "work.0.epoch"),
        (
            f"sessions/{UNKNOWN}/end",
            {"finish_cause": "eog", "generated_tokens": 1, "work": [{"epoch": 1, "prefill_tokens": 2**60}]},
            "work.0.prefill_tokens",
        ),
    ],
)
async def test_malformed_messages_are_refused_by_field(served: Served, path: str, body: Any, told: str) -> None:
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        answer = await http.post(f"{served.client.url}/tracker/v1/{path}", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "bad_request")
    assert told in error["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=colour", "by"),
        ("by=", "by"),
        ("since=soon", "since"),
        ("until=soon", "until"),
        ("since=2026-02-01&until=2026-01-01", "since"),
    ],
)
async def test_what_cannot_be_summed_is_refused_by_parameter(served: Served, query: str, param: str) -> None:
    async with httpx.AsyncClient(headers=AUTHORIZED) as http:
        answer = await http.get(f"{served.client.url}/tracker/v1/ledger?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


async def test_the_client_of_the_ledger_says_what_was_wrong(served: Served) -> None:
    with pytest.raises(RequestError, match="by takes a list") as refused:
        await served.client.ledger(by="colour & more")
    assert refused.value.param == "by"


async def a_repaired_session(client: HttpRouteSource) -> None:
    session = await client.open_session("tiny", avoid_shards=["3-8.b"])
    repaired = await client.repair_session(session.session_id, epoch=1, lost_shards=["3-8"])
    lost = work(session)[1].model_copy(update={"measured": False})
    await finish(client, repaired, work(session)[0], lost, *work(repaired))


async def test_the_ledger_as_people_see_it(served: Served, tmp_path: Path) -> None:
    await a_repaired_session(served.client)
    options = ("--tracker", served.client.url, "--join-token", TOKEN)
    env = environment(tmp_path / "elsewhere")
    shown = await run("ledger", *options, "--by", "node,model", "--since", "1h", env=env)
    assert (shown.code, shown.err) == (0, "")
    (line,) = [text.split() for text in shown.out.splitlines() if text.split()[:1] == ["n1"]]
    # Two routes of 8 layers, 15 tokens each.
    assert line == ["n1", "tiny", "1", "4", "40", "20", "240", "400", "B", "800", "B", "0.0"]
    assert "1 of 4 hops were lost before they could tell what they had done" in shown.out
    told = await run("ledger", *options, "--json", env=env)
    summary = json.loads(told.out)
    assert (summary["by"], summary["lines"][0]["node"], summary["total"]["layer_tokens"]) == (["node"], "n1", 240)
    nothing = await run("ledger", *options, "--until", "2020-01-01", "--json", env=env)
    assert json.loads(nothing.out)["lines"] == []


async def test_a_wrong_option_is_one_line(served: Served, tmp_path: Path) -> None:
    options = ("--tracker", served.client.url, "--join-token", TOKEN)
    ran = await run("ledger", *options, "--since", "soon", env=environment(tmp_path / "elsewhere"))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("meshnet: since is 'soon'; write a date (2026-01-31)")
