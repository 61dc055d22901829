"""What the mesh learns about where models can be cut."""

from __future__ import annotations

from meshnet.core import Boundary, Cut, LayerRange
from meshnet.tracker.cuts import KnownCuts
from tests.support.facts import make_facts
from tests.support.shards import make_shard

DIGEST = "sha256:aa"


def legal(cuts: KnownCuts) -> tuple[int, ...]:
    return cuts.applied(DIGEST, make_facts([1] * 8)).legal_cuts


def test_without_knowledge_the_facts_stand() -> None:
    facts = make_facts([1] * 8, cuts=[2, 5])
    assert KnownCuts().applied(DIGEST, facts) is facts


def test_a_worker_that_names_its_cuts_tells_which_layers_are_none() -> None:
    cuts = KnownCuts()
    shard = make_shard("a", "0:6")
    cuts.learn(shard.model_copy(update={"cuts": (Cut(layer=3, boundary=Boundary(digest="x")),)}))
    assert legal(cuts) == (3, 6, 7)


def test_a_worker_that_names_none_tells_of_its_ends_only() -> None:
    cuts = KnownCuts()
    cuts.learn(make_shard("a", "2:6"))
    assert legal(cuts) == (1, 2, 3, 4, 5, 6, 7)
    assert cuts.applied(DIGEST, make_facts([1] * 8, cuts=[])).legal_cuts == (2, 6)


def test_a_refused_range_is_not_tried_again() -> None:
    cuts = KnownCuts()
    cuts.refuse(DIGEST, LayerRange(start=2, end=5))
    assert legal(cuts) == (1, 3, 4, 6, 7)
    # Somebody could cut at 5: then it was 2.
    cuts.learn(make_shard("a", "5:8"))
    assert legal(cuts) == (1, 3, 4, 5, 6, 7)


def test_knowledge_is_of_one_artifact() -> None:
    cuts = KnownCuts()
    cuts.refuse("sha256:bb", LayerRange(start=2, end=5))
    assert legal(cuts) == (1, 2, 3, 4, 5, 6, 7)
