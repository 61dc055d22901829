"""Route choice against a brute-force search over every chain of shards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.core import LayerRange, Route, Shard
from meshnet.errors import NoRoute
from meshnet.planner.routing import Offer, choose_route, covers, gaps, why_no_route
from tests.support.shards import make_shard


def every_route(shards: Sequence[Shard], chain: tuple[Shard, ...] = ()) -> Iterator[tuple[Shard, ...]]:
    """Every chain that `core.Route` would accept, found by trying all of them."""
    for shard in shards:
        if shard.follows(chain[-1]) if chain else shard.is_head:
            if shard.is_tail:
                yield (*chain, shard)
            else:
                yield from every_route(shards, (*chain, shard))


@st.composite
def offers(draw: st.DrawFn) -> list[Offer]:
    n_layer = draw(st.integers(1, 6))
    n_shards = draw(st.integers(0, 9))
    made = []
    for number in range(n_shards):
        start = draw(st.integers(0, n_layer - 1))
        end = draw(st.integers(start + 1, n_layer))
        shard = make_shard(
            f"s{number}",
            f"{start}:{end}",
            n_layer=n_layer,
            model=draw(st.sampled_from(["tiny", "tiny", "tiny", "other"])),
            artifact=draw(st.sampled_from(["sha256:aa", "sha256:aa", "sha256:bb"])),
            build=draw(st.sampled_from(["b1", "b1", "b2"])),
            boundary_in=draw(st.sampled_from(["residual", "residual", "wide"])),
            boundary_out=draw(st.sampled_from(["residual", "residual", "wide"])),
        )
        made.append(Offer(shard, busy=draw(st.integers(0, 4)) / 4))
    return made


@given(offers(), st.sets(st.sampled_from([f"s{n}" for n in range(9)]), max_size=3), st.randoms())
def test_the_best_of_all_routes_is_chosen(offered: list[Offer], avoid: set[str], order: random.Random) -> None:
    usable = [offer for offer in offered if offer.shard.model == "tiny" and offer.shard.shard_id not in avoid]
    busy = {offer.shard.shard_id: offer.busy for offer in offered}
    possible = list(every_route([offer.shard for offer in usable]))
    try:
        route = choose_route("tiny", offered, avoid=avoid)
    except NoRoute:
        assert not possible
        return

    assert [layer for shard in route.shards for layer in range(shard.layers.start, shard.layers.end)] == list(
        range(route.shards[0].n_layer)
    )
    for same in ("model", "artifact_digest", "compatibility_id", "n_layer"):
        assert len({getattr(shard, same) for shard in route.shards}) == 1
    for previous, shard in zip(route.shards, route.shards[1:], strict=False):
        assert previous.boundary_out.digest == shard.boundary_in.digest
    assert not avoid & {shard.shard_id for shard in route.shards}

    def cost(chain: Sequence[Shard]) -> tuple[float, float, int, list[str]]:
        loads = [busy[shard.shard_id] for shard in chain]
        return max(loads), sum(loads), len(chain), [shard.shard_id for shard in chain]

    assert cost(route.shards) == min(cost(chain) for chain in possible)

    shuffled = list(offered)
    order.shuffle(shuffled)
    assert choose_route("tiny", shuffled, avoid=avoid) == route


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
