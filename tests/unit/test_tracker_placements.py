"""The tracker's placement over time: nodes join, vanish, return, fail; against a real registry and database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.core import LayerRange
from meshnet.planner.model_reading import facts_of
from meshnet.tracker.artifacts import Artifacts
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.messages import Activity, Assignment, Departure, Heartbeat, NodeCapacity, ShardAdvertisement
from meshnet.tracker.placements import FAILING_S, JOIN_S, Placements
from meshnet.tracker.recipes import Recipe
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from tests.support import identities
from tests.support.layered_gguf import layered_bundle
from tests.support.published import small_bundle
from tests.support.shards import advertise, make_shard

SETTINGS = TrackerSettings(heartbeat_s=2, lease_ttl_s=6, placement_grace_s=60)
INSTANCE = "a" * 32
RECIPE = Recipe("tiny", context_tokens=64, sessions=1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return layered_bundle(tmp_path_factory.mktemp("models"))


class Nodes:
    """A tracker's registry with nodes that do as they are told, and its placement."""

    def __init__(self, database: Database, bundle: Bundle, recipes: Sequence[Recipe] = (RECIPE,)) -> None:
        self.database = database
        self.bundle = bundle
        self.recipes = recipes
        self.clock = Clock()
        self.artifacts = Artifacts(database)
        self.open_on: dict[str, int] = {}
        self.capacities: dict[str, NodeCapacity | None] = {}
        self.epochs: dict[str, int] = {}
        #: How often a node's workers were started, by node and layers: it makes their ids.
        self.starts: dict[tuple[str, str], int] = {}
        self._ports: dict[str, int] = {}
        facts = facts_of(bundle.artifact, "tiny")
        halves = [facts.memory_bytes(LayerRange.parse(half), 64, 1) for half in ("0:4", "4:8")]
        #: Holds four layers and no more.
        self.half = NodeCapacity(memory_bytes=round(max(halves) / 0.9) + 1000, disk_bytes=10**9, threads=1)
        self._track()

    def _track(self) -> None:
        self.registry = Registry(self.database, SETTINGS, clock=self.clock)
        self.placements = Placements(
            self.registry, self.artifacts, SETTINGS, self.recipes, open_on=lambda shard: self.open_on.get(shard, 0)
        )
        self.registry.assignments = self.placements.assignments

    async def restart_tracker(self) -> None:
        self._track()
        await self.registry.restore()

    async def join(self, *node_ids: str, capacity: NodeCapacity | None = None) -> None:
        for node_id in node_ids:
            lease = await identities.register(self.registry, INSTANCE, node_id)
            self.epochs[node_id] = lease.lease_epoch
            self.capacities[node_id] = capacity or self.half
            await self.beat(node_id)

    async def beat(
        self, node_id: str, *, activities: Sequence[Activity] = (), shards: Sequence[ShardAdvertisement] | None = None
    ) -> tuple[Assignment, ...] | None:
        """A heartbeat of a node that serves what it is told to."""
        told = self.placements.assignments(node_id) or ()
        failed = {str(activity.layers) for activity in activities}
        if shards is None:
            shards = [self.shard(node_id, str(one.layers)) for one in told if str(one.layers) not in failed]
        answer = await self.registry.heartbeat(
            node_id,
            Heartbeat(
                lease_epoch=self.epochs[node_id],
                instance=INSTANCE,
                shards=tuple(shards),
                capacity=self.capacities[node_id],
                activities=tuple(activities),
            ),
        )
        return answer.assignments

    def shard(self, node_id: str, layers: str) -> ShardAdvertisement:
        start = self.starts.setdefault((node_id, layers), 0)
        shard_id = f"{node_id}/{layers.replace(':', '-')}.{start}"
        port = self._ports.setdefault(shard_id, 1000 + len(self._ports))
        return advertise(
            make_shard(shard_id, layers, model="tiny", artifact=self.bundle.digest, address=f"127.0.0.1:{port}")
        )

    async def later(self, seconds: float, *present: str) -> None:
        """Time passes, planned for every half second; ``present`` nodes report every second."""
        for step in range(round(seconds * 2)):
            self.clock.now += 0.5
            if step % 2:
                for node_id in present:
                    await self.beat(node_id)
                await self.registry.expire()
            await self.placements.plan()

    def layers(self, node_id: str) -> list[str] | None:
        told = self.placements.assignments(node_id)
        return None if told is None else [str(one.layers) for one in told]

    def activity(self, layers: str, *, refused: bool = False) -> Activity:
        return Activity(
            artifact_digest=self.bundle.digest,
            model="tiny",
            layers=LayerRange.parse(layers),
            state="failed",
            since_unix_s=0,
            trouble="it does not work",
            refused=refused,
        )


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield opened
    await opened.close()


@pytest.fixture
async def nodes(database: Database, bundle: Bundle) -> Nodes:
    started = Nodes(database, bundle)
    await started.artifacts.publish(bundle)
    return started


async def halves_and_spare(nodes: Nodes) -> tuple[str, str, str]:
    """Three nodes of which two hold the same half; the other, and these two."""
    await nodes.join("a", "b", "c")
    await nodes.later(JOIN_S + 1, "a", "b", "c")
    told = {node_id: nodes.layers(node_id) for node_id in "abc"}
    assert sorted(map(str, told.values())) in (
        [str(["0:4"]), str(["0:4"]), str(["4:8"])],
        [str(["0:4"]), str(["4:8"]), str(["4:8"])],
    )
    single = next(node_id for node_id in told if list(told.values()).count(told[node_id]) == 1)
    first, second = sorted(set("abc") - {single})
    return single, first, second


async def test_nodes_that_start_together_are_planned_for_together(nodes: Nodes) -> None:
    await nodes.join("a")
    await nodes.later(JOIN_S - 0.5, "a")
    await nodes.join("b")
    await nodes.later(JOIN_S - 0.5, "a", "b")
    assert (nodes.layers("a"), nodes.layers("b")) == (None, None)
    await nodes.later(1, "a", "b")
    assert sorted(map(str, (nodes.layers("a"), nodes.layers("b")))) == [str(["0:4"]), str(["4:8"])]
    (told,) = nodes.placements.assignments("a") or ()
    assert (told.artifact_digest, told.model, told.context_tokens, told.sessions) == (
        nodes.bundle.digest,
        "tiny",
        64,
        1,
    )
    assert 0 < told.memory_bytes <= nodes.half.memory_bytes


async def test_what_is_held_stays_whoever_joins(nodes: Nodes) -> None:
    await nodes.join("a", "b")
    await nodes.later(JOIN_S + 1, "a", "b")
    before = (nodes.layers("a"), nodes.layers("b"))
    large = nodes.half.model_copy(update={"memory_bytes": 10**10})
    await nodes.join("c", capacity=large)
    await nodes.later(10, "a", "b", "c")
    assert (nodes.layers("a"), nodes.layers("b")) == before
    assert nodes.layers("c") is not None


async def test_a_spare_steps_in_when_a_node_is_lost_and_its_return_moves_nobody(nodes: Nodes) -> None:
    single, first, second = await halves_and_spare(nodes)
    gone_layers = nodes.layers(single)
    await nodes.later(SETTINGS.lease_ttl_s + 1, first, second)
    after = {node_id: nodes.layers(node_id) for node_id in (first, second)}
    assert gone_layers in after.values()
    assert len({str(layers) for layers in after.values()}) == 2
    # Its place was kept: what it has on its disk it has again, and the others go on.
    await nodes.join(single)
    assert await nodes.beat(single) == nodes.placements.assignments(single)
    await nodes.later(5, first, second, single)
    assert nodes.layers(single) == gone_layers
    assert {node_id: nodes.layers(node_id) for node_id in (first, second)} == after


@pytest.mark.parametrize("which", [0, 1])
async def test_a_replica_that_has_sessions_is_not_the_one_that_moves(nodes: Nodes, which: int) -> None:
    single, *replicas = await halves_and_spare(nodes)
    (layers,) = nodes.layers(replicas[0]) or [""]
    moved = nodes.layers(single)
    busy, free = replicas[which], replicas[1 - which]
    nodes.open_on = {nodes.shard(busy, layers).shard.shard_id: 1}
    await nodes.later(SETTINGS.lease_ttl_s + 1, *replicas)
    assert (nodes.layers(busy), nodes.layers(free)) == ([layers], moved)


async def test_sessions_that_wait_speed_it_up(nodes: Nodes) -> None:
    single, first, second = await halves_and_spare(nodes)
    wanted = nodes.layers(single)
    lost = nodes.shard(single, (wanted or [""])[0]).shard.shard_id
    nodes.clock.now += 0.5
    nodes.placements.lost([lost])
    # Its lease is good for seconds yet, but it has missed a report.
    await nodes.later(1, first, second)
    assert wanted not in (nodes.layers(first), nodes.layers(second))
    await nodes.later(2.5, first, second)
    urgent = [one.urgent for node_id in (first, second) for one in nodes.placements.assignments(node_id) or ()]
    assert wanted in (nodes.layers(first), nodes.layers(second))
    # Of the two, only the one that steps in has to hurry.
    assert sorted(urgent) == [False, True]


async def test_a_shard_whose_node_reports_without_it_is_waited_for(nodes: Nodes) -> None:
    single, first, second = await halves_and_spare(nodes)
    (layers,) = nodes.layers(single) or [""]
    before = (nodes.layers(first), nodes.layers(second))
    lost = nodes.shard(single, layers).shard.shard_id
    nodes.starts[single, layers] = 1  # its worker has been started anew
    nodes.placements.lost([lost])
    await nodes.later(20, first, second, single)
    assert (nodes.layers(first), nodes.layers(second)) == before


async def test_nobody_moves_for_a_node_that_may_be_back_unless_sessions_wait(nodes: Nodes) -> None:
    large = nodes.half.model_copy(update={"memory_bytes": 10**10})
    await nodes.join("a", "b")
    await nodes.later(JOIN_S + 1, "a", "b")
    before = nodes.layers("a")
    # Both could hold everything by now, but neither gives its part up for that.
    nodes.capacities = {"a": large, "b": large}
    await nodes.later(5, "a", "b")
    (lost_layers,) = nodes.layers("b") or [""]
    await nodes.later(SETTINGS.lease_ttl_s + 5, "a")
    assert nodes.layers("a") == before
    for _ in range(8):
        nodes.placements.lost([nodes.shard("b", lost_layers).shard.shard_id])
        await nodes.later(0.5, "a")
    assert nodes.layers("a") == ["0:8"]


async def test_after_the_grace_time_others_move(nodes: Nodes) -> None:
    large = nodes.half.model_copy(update={"memory_bytes": 10**10})
    await nodes.join("a", "b")
    await nodes.later(JOIN_S + 1, "a", "b")
    nodes.capacities = {"a": large, "b": large}
    await nodes.later(SETTINGS.placement_grace_s - 5, "a")
    assert nodes.layers("a") != ["0:8"]
    await nodes.later(10, "a")
    assert nodes.layers("a") == ["0:8"]
    assert nodes.layers("b") is None


async def test_a_node_that_left_is_not_waited_for(nodes: Nodes) -> None:
    large = nodes.half.model_copy(update={"memory_bytes": 10**10})
    await nodes.join("a", "b")
    await nodes.later(JOIN_S + 1, "a", "b")
    nodes.capacities = {"a": large, "b": large}
    await nodes.beat("a")
    await nodes.registry.deregister("b", Departure(lease_epoch=nodes.epochs["b"], instance=INSTANCE))
    await nodes.later(1, "a")
    assert nodes.layers("a") == ["0:8"]


async def test_a_restarted_tracker_tells_nothing_before_it_knows_what_nodes_hold(nodes: Nodes) -> None:
    single, first, second = await halves_and_spare(nodes)
    before = {node_id: nodes.placements.assignments(node_id) for node_id in (single, first, second)}
    shards = {node_id: [nodes.shard(node_id, str((told or ())[0].layers))] for node_id, told in before.items()}
    await nodes.restart_tracker()
    for node_id in (first, second):
        nodes.clock.now += 0.5
        assert await nodes.beat(node_id, shards=shards[node_id]) is None
        await nodes.placements.plan()
        assert nodes.layers(node_id) is None
    nodes.clock.now += 0.5
    assert await nodes.beat(single, shards=shards[single]) is None
    await nodes.placements.plan()
    assert {node_id: nodes.placements.assignments(node_id) for node_id in before} == before


async def test_a_refused_range_is_not_given_to_anybody_again(nodes: Nodes) -> None:
    await nodes.join("a", "b", "c")
    await nodes.later(JOIN_S + 1, "a", "b", "c")
    holder = next(node_id for node_id in "abc" if nodes.layers(node_id) == ["0:4"])
    for _ in range(3):
        for node_id in "abc":
            refused = [nodes.activity(layers, refused=True) for layers in nodes.layers(node_id) or () if "4" in layers]
            await nodes.beat(node_id, activities=refused)
        nodes.clock.now += 0.5
        await nodes.placements.plan()
    told = [layers for node_id in "abc" for layers in nodes.layers(node_id) or ()]
    assert told
    assert not [layers for layers in told if "4" in layers]
    assert nodes.layers(holder) != ["0:4"]


async def test_a_node_that_fails_for_long_is_relieved(nodes: Nodes) -> None:
    await nodes.join("a")
    await nodes.later(JOIN_S + 1, "a")
    (layers,) = nodes.layers("a") or [""]
    for _ in range(round(FAILING_S) + 1):
        nodes.clock.now += 1
        await nodes.beat("a", activities=[nodes.activity(layers)])
        await nodes.placements.plan()
    assert nodes.layers("a") == []


async def test_a_node_may_be_lent_to_one_artifact(nodes: Nodes) -> None:
    await nodes.join("a", capacity=nodes.half.model_copy(update={"artifact": "another"}))
    await nodes.join("b", capacity=nodes.half.model_copy(update={"artifact": nodes.bundle.digest[7:20]}))
    await nodes.later(JOIN_S + 1, "a", "b")
    assert nodes.layers("a") == []
    assert len(nodes.layers("b") or []) == 1


async def test_nodes_with_layers_of_their_own_count_and_are_told_nothing(nodes: Nodes) -> None:
    lease = await identities.register(nodes.registry, INSTANCE, "fixed")
    nodes.epochs["fixed"], nodes.capacities["fixed"] = lease.lease_epoch, None
    shards = [nodes.shard("fixed", "0:3")]
    await nodes.join("a", capacity=nodes.half.model_copy(update={"memory_bytes": 10**10}))
    for _ in range(8):
        nodes.clock.now += 0.5
        assert await nodes.beat("fixed", shards=shards) is None
        await nodes.beat("a")
        await nodes.placements.plan()
    assert nodes.layers("a") == ["3:8"]
    assert nodes.layers("fixed") is None


async def test_what_other_nodes_get_ready_counts_too(nodes: Nodes) -> None:
    lease = await identities.register(nodes.registry, INSTANCE, "fixed")
    nodes.epochs["fixed"], nodes.capacities["fixed"] = lease.lease_epoch, None
    pulling = nodes.activity("0:3").model_copy(update={"state": "pulling", "trouble": ""})
    await nodes.join("a", capacity=nodes.half.model_copy(update={"memory_bytes": 10**10}))
    for _ in range(8):
        nodes.clock.now += 0.5
        await nodes.beat("fixed", shards=[], activities=[pulling])
        await nodes.beat("a")
        await nodes.placements.plan()
    assert nodes.layers("a") == ["3:8"]


async def fixed_halves_and_spare(nodes: Nodes) -> list[ShardAdvertisement]:
    """Two nodes with a half each, that they chose, and one that lends and is a replica of one. What these two offer."""
    shards = []
    for node_id, layers in (("x", "0:4"), ("y", "4:8")):
        lease = await identities.register(nodes.registry, INSTANCE, node_id)
        nodes.epochs[node_id], nodes.capacities[node_id] = lease.lease_epoch, None
        shards.append(nodes.shard(node_id, layers))
    await nodes.join("a")
    for _ in range(round(2 * JOIN_S) + 2):
        nodes.clock.now += 0.5
        await beat_fixed(nodes, shards)
    assert nodes.layers("a") in (["0:4"], ["4:8"])
    return shards


async def beat_fixed(nodes: Nodes, shards: Sequence[ShardAdvertisement]) -> None:
    for node_id in ("x", "y"):
        mine = [one for one in shards if one.shard.shard_id.startswith(f"{node_id}/")]
        await nodes.beat(node_id, shards=mine)
    await nodes.beat("a")
    await nodes.placements.plan()


async def test_nobody_moves_while_a_node_starts_its_worker_again(nodes: Nodes) -> None:
    shards = await fixed_halves_and_spare(nodes)
    (held,) = nodes.layers("a") or [""]
    others = [one for one in shards if str(one.shard.layers) == held]
    for _ in range(2):
        nodes.clock.now += 0.5
        await beat_fixed(nodes, others)
    assert nodes.layers("a") == [held]
    for _ in range(10):
        nodes.clock.now += 0.5
        await beat_fixed(nodes, shards)
    assert nodes.layers("a") == [held]


async def test_a_spare_steps_in_for_a_worker_that_does_not_come_back(nodes: Nodes) -> None:
    shards = await fixed_halves_and_spare(nodes)
    (held,) = nodes.layers("a") or [""]
    (others,) = [one for one in shards if str(one.shard.layers) == held]
    (missing,) = [one for one in shards if str(one.shard.layers) != held]
    for _ in range(5):
        nodes.clock.now += 0.5
        await beat_fixed(nodes, [others])
    assert nodes.layers("a") == [str(missing.shard.layers)]
    # When it is back after all, the spare keeps what it has.
    for _ in range(5):
        nodes.clock.now += 0.5
        await beat_fixed(nodes, shards)
    assert nodes.layers("a") == [str(missing.shard.layers)]


async def test_what_is_no_model_is_passed_over(database: Database, bundle: Bundle, tmp_path: Path) -> None:
    nodes = Nodes(database, bundle, recipes=())
    await nodes.artifacts.publish(small_bundle(tmp_path))
    await nodes.artifacts.publish(bundle)
    await nodes.join("a", capacity=nodes.half.model_copy(update={"memory_bytes": 10**10}))
    await nodes.later(JOIN_S + 1, "a")
    assert nodes.layers("a") == ["0:8"]
    (told,) = nodes.placements.assignments("a") or ()
    # No more than the model was trained for, and otherwise a worker's defaults.
    assert (told.context_tokens, told.sessions) == (1024, 4)
