"""Route choice against a brute-force search over every chain of shards."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.core import LayerRange, Route, Shard
from meshnet.errors import NoRoute
from meshnet.planner.coverage import HeldUp
from meshnet.planner.routing import Link, Offer, RouteRequest, choose_route, covers, gaps, why_no_route
from tests.support.shards import make_shard


def parts_of(shard: Shard) -> list[Shard]:
    """Every range that a session may use of it."""
    ends = sorted({shard.layers.start, shard.layers.end} | {cut.layer for cut in shard.cuts})
    return [shard.part(LayerRange(start=start, end=end)) for start, end in combinations(ends, 2)]


def every_route(shards: Sequence[Shard], chain: tuple[Shard, ...] = ()) -> Iterator[tuple[Shard, ...]]:
    """Every chain that `core.Route` would accept and in which no shard stands twice, found by trying all of them."""
    for whole in shards:
        if whole.shard_id in {shard.shard_id for shard in chain}:
            continue
        for shard in parts_of(whole):
            if shard.follows(chain[-1]) if chain else shard.is_head:
                if shard.is_tail:
                    yield (*chain, shard)
                else:
                    yield from every_route(shards, (*chain, shard))


@st.composite
def offers(draw: st.DrawFn, max_shards: int = 7) -> list[Offer]:
    n_layer = draw(st.integers(1, 6))
    n_shards = draw(st.integers(0, max_shards))
    made = []
    for number in range(n_shards):
        start = draw(st.integers(0, n_layer - 1))
        end = draw(st.integers(start + 1, n_layer))
        shard = make_shard(
            f"s{number}",
            f"{start}:{end}",
            n_layer=n_layer,
            model=draw(st.sampled_from(["tiny", "tiny", "tiny", "other"])),
            artifact=draw(st.sampled_from(["sha256:aa", "sha256:aa", "sha256:aa", "sha256:bb"])),
            build=draw(st.sampled_from(["b1", "b1", "b1", "b2"])),
            boundary_in=draw(st.sampled_from(["residual", "residual", "residual", "wide"])),
            boundary_out=draw(st.sampled_from(["residual", "residual", "residual", "wide"])),
            capacity_tokens=draw(st.sampled_from([512, 512, 100])),
            cuts=[layer for layer in range(start + 1, end) if draw(st.integers(0, 2))],
        )
        made.append(
            Offer(
                shard,
                busy=draw(st.integers(0, 4)) / 4,
                node_id=f"n{number % 4}",
                prefill_us=draw(st.sampled_from([None, 10.0, 10.0, 300.0])),
                decode_us=draw(st.sampled_from([None, 50.0, 50.0, 2000.0])),
                recent=draw(st.sampled_from([0.0, 0.0, 3.0])),
                prefill_seen_us=draw(st.sampled_from([math.inf, 1e6])),
                decode_seen_us=draw(st.sampled_from([math.inf, 1e5])),
            )
        )
    return made


SHARD_IDS = [f"s{number}" for number in range(7)]
NODE_PAIRS = st.tuples(*[st.sampled_from([f"n{number}" for number in range(4)])] * 2)
LINKS = st.dictionaries(
    NODE_PAIRS, st.builds(Link, st.sampled_from([0.1, 5.0, 40.0]), st.sampled_from([None, 1e6, 1e9])), max_size=6
)
RANGES = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(
    lambda span: LayerRange(start=min(span[0], span[1] - 1), end=span[1])
)
REQUESTS = st.builds(
    RouteRequest, st.sampled_from([1, 1000]), st.sampled_from([1, 100]), st.sampled_from([0, 300, 1000])
)


def cost(
    chain: Sequence[Shard],
    offered: Sequence[Offer],
    request: RouteRequest,
    keep: Mapping[str, LayerRange],
    links: Mapping[tuple[str, str], Link],
) -> tuple[int, int, int, int]:
    """What a route is judged by: tokens that do not fit, layers not kept, full hops, microseconds."""
    by_id = {offer.shard.shard_id: offer for offer in offered}
    kin = [offer for offer in offered if offer.shard.model == "tiny"]
    hops = [by_id[shard.shard_id] for shard in chain]
    kept = {shard.shard_id for shard in chain if keep.get(shard.shard_id) == shard.layers}
    steps_us = 200.0 * (request.answer_tokens + math.ceil(request.prompt_tokens / 64))
    time_us = 0
    for shard, offer in zip(chain, hops, strict=True):
        prefill_mean = mean([1.0 / o.prefill_us for o in kin if o.prefill_us] or [1.0 / 200.0])
        decode_mean = mean([1.0 / o.decode_us for o in kin if o.decode_us] or [1.0 / 1000.0])
        work_us = request.prompt_tokens / speed(offer.prefill_us, offer.prefill_seen_us, prefill_mean)
        work_us += request.answer_tokens / speed(offer.decode_us, offer.decode_seen_us, decode_mean)
        waits = offer.busy * 4 + 0.05 * offer.recent
        time_us += len(shard.layers) * round(work_us * (1.0 + waits) + steps_us / len(offer.shard.layers) * waits)
    for giver, taker in pairwise(hops):
        link = link_between(giver, taker, links)
        time_us += 1 + round(steps_us + 500.0 * link.rtt_ms * (request.answer_tokens + 1))
    back = link_between(hops[-1], hops[0], links)
    time_us += round(500.0 * back.rtt_ms * request.answer_tokens)
    return (
        max(0, request.capacity_tokens - min(shard.session_capacity_tokens for shard in chain)),
        -sum(len(shard.layers) for shard in chain if shard.shard_id in kept),
        sum(offer.busy >= 1.0 and offer.shard.shard_id not in kept for offer in hops),
        time_us,
    )


def speed(measured_us: float | None, seen_us: float, mean_speed: float) -> float:
    """Of the measurement and of the mean, as tokens of a layer per microsecond, weighed by two seconds of doubt."""
    doubt = 1.0 if measured_us is None else 2e6 / (2e6 + seen_us)
    return (0.0 if measured_us is None else (1.0 - doubt) / measured_us) + doubt * mean_speed


def link_between(giver: Offer, taker: Offer, links: Mapping[tuple[str, str], Link]) -> Link:
    if links and giver.node_id == taker.node_id:
        return Link(0.1, 1e9)
    return links.get((giver.node_id, taker.node_id), Link(1.0, 100e6))


@settings(max_examples=400)
@given(
    offers(),
    REQUESTS,
    st.sets(st.sampled_from(SHARD_IDS), max_size=2),
    st.dictionaries(st.sampled_from(SHARD_IDS), RANGES, max_size=3),
    LINKS,
    st.randoms(),
)
def test_the_best_of_all_routes_is_chosen(
    offered: list[Offer],
    request: RouteRequest,
    avoid: set[str],
    keep: dict[str, LayerRange],
    links: dict[tuple[str, str], Link],
    order: random.Random,
) -> None:
    usable = [offer for offer in offered if offer.shard.model == "tiny" and offer.shard.shard_id not in avoid]
    possible = list(every_route([offer.shard for offer in usable]))
    try:
        route = choose_route("tiny", offered, request=request, avoid=avoid, keep=keep, links=links)
    except NoRoute:
        assert not possible
        return

    assert [layer for shard in route.shards for layer in range(shard.layers.start, shard.layers.end)] == list(
        range(route.shards[0].n_layer)
    )
    for same in ("model", "artifact_digest", "compatibility_id", "n_layer"):
        assert len({getattr(shard, same) for shard in route.shards}) == 1
    for previous, shard in pairwise(route.shards):
        assert previous.boundary_out.digest == shard.boundary_in.digest
    assert not avoid & {shard.shard_id for shard in route.shards}

    assert cost(route.shards, usable, request, keep, links) == min(
        cost(chain, usable, request, keep, links) for chain in possible
    )

    shuffled = list(offered)
    order.shuffle(shuffled)
    assert choose_route("tiny", shuffled, request=request, avoid=avoid, keep=keep, links=links) == route


@given(offers())
def test_covers_agrees_with_the_search(offered: list[Offer]) -> None:
    shards = [offer.shard for offer in offered]
    assert covers(shards) == bool(list(every_route(shards)))


def test_a_chain_is_a_route() -> None:
    shards = [make_shard("b", "3:8"), make_shard("a", "0:3")]
    assert choose_route("tiny", map(Offer, shards)) == Route(shards=(shards[1], shards[0]))


def reason(*shards: Shard, avoid: tuple[str, ...] = ()) -> str:
    with pytest.raises(NoRoute) as caught:
        choose_route("tiny", map(Offer, shards), avoid=avoid)
    return str(caught.value)


def test_no_shard_at_all() -> None:
    assert reason() == "no route for tiny: no ready shard holds any of its layers; start a node that serves it"


def test_a_gap_is_named_with_its_layers() -> None:
    told = reason(make_shard("a", "0:3"), make_shard("b", "5:8"))
    assert told == "no route for tiny: gap at layer 3: no ready shard holds layers 3:5"


def test_shards_that_are_not_ready_are_counted_with_their_reasons() -> None:
    waiting = [HeldUp(make_shard(f"n{n}/w", "0:8"), "not probed yet") for n in range(3)]
    none = "no ready shard holds any of its layers; "
    assert why_no_route([], waiting[:1]) == none + "1 shard is advertised but not ready (n0/w: not probed yet)"
    refused = HeldUp(make_shard("n3/w", "0:8"), "cannot be reached")
    told = "4 shards are advertised but not ready (for example n0/w: not probed yet; n3/w: cannot be reached)"
    assert why_no_route([], [refused, *waiting]) == none + told


def test_only_shards_that_would_fill_the_gap_are_counted() -> None:
    waiting = [HeldUp(make_shard("b", "3:8"), "not probed yet"), HeldUp(make_shard("a2", "0:3"), "not probed yet")]
    told = why_no_route([make_shard("a", "0:3")], waiting)
    gap = "gap at layer 3: no ready shard holds layers 3:8"
    assert told == f"{gap}; 1 shard there is advertised but not ready (b: not probed yet)"
    assert why_no_route([make_shard("a", "0:3")], waiting[1:]) == gap


def test_what_is_told_of_shards_that_are_not_ready_is_bounded() -> None:
    waiting = [HeldUp(make_shard(f"n{n}/w", "0:8"), f"{n} " + "x" * 10_000) for n in range(100)]
    told = why_no_route([], waiting)
    assert "100 shards are advertised but not ready (for example n0/w: 0 xx" in told
    assert len(told) < 700


def test_what_holds_shards_up_is_only_asked_without_a_route() -> None:
    def never() -> list[HeldUp]:
        raise AssertionError

    choose_route("tiny", [Offer(make_shard("a", "0:8"))], held_up=never)


def test_a_missing_head_is_a_gap_at_layer_0() -> None:
    assert "gap at layer 0: no ready shard holds layers 0:3" in reason(make_shard("b", "3:8"))


def test_overlapping_ranges_that_do_not_meet() -> None:
    told = reason(make_shard("a", "0:5"), make_shard("b", "3:8"))
    assert "gap at layer 5: no ready shard starts there; b holds 3:8, but ranges must meet exactly" in told


def test_different_builds_are_named() -> None:
    told = reason(make_shard("a", "0:3", build="b1"), make_shard("b", "3:8", build="b2"))
    assert "different builds at layer 3: a is b1, b is b2" in told


def test_different_model_files_are_named() -> None:
    told = reason(make_shard("a", "0:3", artifact="sha256:aa"), make_shard("b", "3:8", artifact="sha256:bb"))
    assert "different model files at layer 3: a serves sha256:aa, b serves sha256:bb" in told


def test_a_boundary_mismatch_is_named() -> None:
    told = reason(make_shard("a", "0:3", boundary_out="x"), make_shard("b", "3:8", boundary_in="y"))
    assert "boundary mismatch at layer 3: a gives x, b takes y" in told


def test_avoided_shards_are_named() -> None:
    told = reason(make_shard("a", "0:3"), make_shard("b", "3:8"), avoid=("b", "gone"))
    assert told == (
        "no route for tiny (leaving out b, which just failed or refused): gap at layer 3: no ready shard holds layers "
        "3:8"
    )


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(1, 10)), max_size=6))
def test_gaps_are_the_layers_that_nobody_holds(n_layer: int, spans: list[tuple[int, int]]) -> None:
    ranges = [LayerRange(start=start, end=min(n_layer, start + size)) for start, size in spans if start < n_layer]
    held = {layer for layers in ranges for layer in range(layers.start, layers.end)}
    found = gaps(n_layer, ranges)
    assert [layer for gap in found for layer in range(gap.start, gap.end)] == sorted(set(range(n_layer)) - held)
    # Neighbouring gaps would be one gap.
    assert all(first.end < second.start for first, second in pairwise(found))


def test_the_reason_follows_the_route_that_gets_furthest() -> None:
    told = why_no_route(
        [make_shard("a", "0:2"), make_shard("c", "0:5", build="b2"), make_shard("d", "6:8", build="b2")]
    )
    assert told == "gap at layer 5: no ready shard holds layers 5:6"


# ------------------------------------------------------------------------------------------------------ sharing load


def shares(
    offered: Sequence[Offer], n_requests: int, *, lasting: int, request: RouteRequest | None = None
) -> list[int]:
    """Sessions per shard, in the order given, of equal requests each of which is open while ``lasting`` more come."""
    open_sessions: list[list[str]] = []
    given: Counter[str] = Counter()
    for _ in range(n_requests):
        busy = Counter(shard_id for session in open_sessions for shard_id in session)
        snapshot = [
            replace(
                offer,
                busy=busy[offer.shard.shard_id] / offer.shard.session_slots,
                recent=given[offer.shard.shard_id],
            )
            for offer in offered
        ]
        route = choose_route("tiny", snapshot, request=request or RouteRequest())
        chosen = [shard.shard_id for shard in route.shards]
        given.update(chosen)
        open_sessions = [*open_sessions, chosen][-lasting:] if lasting else []
    return [given[offer.shard.shard_id] for offer in offered]


def replicas(number: int, *, prefill_us: Sequence[float] = (100.0,)) -> list[Offer]:
    """Twelve ranges of two layers, ``number`` shards each, whose costs are taken in turn from ``prefill_us``."""
    return [
        Offer(
            make_shard(f"s{start}-{copy}", f"{start}:{start + 2}", n_layer=24, slots=16),
            prefill_us=prefill_us[copy % len(prefill_us)],
            decode_us=10 * prefill_us[copy % len(prefill_us)],
        )
        for start in range(0, 24, 2)
        for copy in range(number)
    ]


@pytest.mark.parametrize("lasting", [0, 1, 8])
def test_equal_replicas_take_turns(lasting: int) -> None:
    assert shares(replicas(3), 30, lasting=lasting) == [10] * 36


@pytest.mark.parametrize("lasting", [0, 1, 8])
def test_no_replica_has_much_more_than_the_mean(lasting: int) -> None:
    # Measured costs of equal machines are never quite equal.
    given = shares(replicas(3, prefill_us=(100.0, 103.0, 97.0)), 90, lasting=lasting)
    assert max(given) <= 1.3 * 30
    assert sum(given) == 12 * 90


@pytest.mark.parametrize("lasting", [0, 1, 4])
def test_costs_far_below_that_of_a_step_move_no_load(lasting: int) -> None:
    # One layer of a tiny model: what was measured is mostly when the machine was busy with something else.
    offered = [
        Offer(make_shard(f"s{layer}-{copy}", f"{layer}:{layer + 1}", n_layer=12), prefill_us=us / 4, decode_us=us)
        for layer in range(12)
        for copy, us in enumerate((20.0, 50.0))
    ]
    given = shares(offered, 90, lasting=lasting, request=RouteRequest(prompt_tokens=40, answer_tokens=4))
    assert max(given) <= 1.3 * 45


def test_a_worker_of_the_same_node_is_nearer_than_one_of_another() -> None:
    offered = [
        Offer(make_shard(f"{node}-{layers}", layers), node_id=node) for node in "ab" for layers in ("0:4", "4:8")
    ]
    links = {pair: Link(0.5, 100e6) for pair in (("a", "b"), ("b", "a"))}
    nodes = {shard.shard_id[0] for shard in choose_route("tiny", offered, links=links).shards}
    assert len(nodes) == 1


@pytest.mark.parametrize(("seen_us", "most"), [(2e4, 1.1), (1e9, math.inf)])
def test_what_was_seen_for_a_moment_moves_no_load(seen_us: float, most: float) -> None:
    offered = [
        Offer(make_shard(name, "0:8"), prefill_us=us / 4, prefill_seen_us=seen_us, decode_us=us, decode_seen_us=seen_us)
        for name, us in (("a", 20_000.0), ("b", 60_000.0))
    ]
    given = shares(offered, 90, lasting=4)
    assert max(given) <= most * 45
    assert seen_us == 2e4 or max(given) >= 1.3 * 45


def test_a_faster_replica_gets_more() -> None:
    slow, fast = shares(
        [
            Offer(make_shard("slow", "0:8", slots=16), prefill_us=200.0, decode_us=2000.0),
            Offer(make_shard("fast", "0:8", slots=16), prefill_us=100.0, decode_us=1000.0),
        ],
        90,
        lasting=6,
    )
    assert 1.5 * slow <= fast <= 2.5 * slow


def test_a_full_replica_is_used_only_if_there_is_no_other() -> None:
    full = Offer(make_shard("full", "0:8"), free_slots=0, prefill_us=1.0, decode_us=1.0)
    slow = Offer(make_shard("slow", "0:8"), free_slots=1, busy=0.9, prefill_us=900.0, decode_us=900.0)
    assert choose_route("tiny", [full, slow]).shards[0].shard_id == "slow"
    assert choose_route("tiny", [full]).shards[0].shard_id == "full"


def test_the_request_decides_between_fast_prefill_and_fast_decode() -> None:
    offered = [
        Offer(make_shard("reads", "0:8"), prefill_us=10.0, decode_us=1000.0),
        Offer(make_shard("writes", "0:8"), prefill_us=100.0, decode_us=100.0),
    ]
    long_prompt = RouteRequest(prompt_tokens=10_000, answer_tokens=10)
    long_answer = RouteRequest(prompt_tokens=10, answer_tokens=10_000)
    assert choose_route("tiny", offered, request=long_prompt).shards[0].shard_id == "reads"
    assert choose_route("tiny", offered, request=long_answer).shards[0].shard_id == "writes"


def test_a_part_of_an_overlapping_shard_is_used() -> None:
    shards = [make_shard("a", "0:5", cuts=range(1, 5)), make_shard("b", "3:8", cuts=range(4, 8))]
    route = choose_route("tiny", map(Offer, shards))
    assert [shard.shard_id for shard in route.shards] == ["a", "b"]
    assert route.shards[0].layers.end == route.shards[1].layers.start in (3, 4, 5)


def test_replicas_do_not_divide_a_range_because_one_link_looks_shorter() -> None:
    # Round trips on one machine, most of which is when a thread got its core.
    offered = [
        Offer(
            make_shard(name, layers, n_layer=6, cuts=[cut]),
            node_id=name,
            prefill_us=us,
            decode_us=10 * us,
        )
        for name, layers, cut, us in (
            ("near-to-tail", "0:2", 1, 10.0),
            ("near-to-middle", "0:2", 1, 10.5),
            ("middle", "2:4", 3, 10.0),
            ("tail", "4:6", 5, 10.0),
        )
    ]
    names = [offer.node_id for offer in offered]
    links = {(giver, taker): Link(0.04, 100e6) for giver in names for taker in names if giver != taker}
    links["near-to-tail", "middle"] = links["tail", "near-to-middle"] = Link(0.35, 100e6)
    request = RouteRequest(prompt_tokens=24, answer_tokens=96)
    route = choose_route("tiny", offered, request=request, links=links)
    assert len(route.shards) == 3
    # Where links really differ, a hop more is worth its time.
    links["near-to-tail", "middle"] = links["tail", "near-to-middle"] = Link(20.0, 100e6)
    route = choose_route("tiny", offered, request=request, links=links)
    assert [str(shard.layers) for shard in route.shards] == ["0:1", "1:2", "2:4", "4:6"]


def test_a_broken_route_keeps_what_survives() -> None:
    offered = [
        Offer(make_shard("a", "0:3", cuts=[1, 2]), busy=0.75),
        Offer(make_shard("c", "5:8"), free_slots=0),
        Offer(make_shard("spare", "3:5")),
        Offer(make_shard("whole", "0:8"), prefill_us=0.1, decode_us=0.1),
    ]
    keep = {"a": LayerRange(start=0, end=3), "c": LayerRange(start=5, end=8)}
    assert [shard.shard_id for shard in choose_route("tiny", offered).shards] == ["whole"]
    repaired = choose_route("tiny", offered, avoid=("b",), keep=keep)
    assert [shard.shard_id for shard in repaired.shards] == ["a", "spare", "c"]


def test_a_thousand_shards_are_searched_in_a_moment() -> None:
    offered = replicas(84)
    choose_route("tiny", offered)
    took_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        choose_route("tiny", offered)
        took_s.append(time.perf_counter() - began_s)
    # About a millisecond; far above that so as not to judge the machine.
    assert min(took_s) < 0.02
