"""Which shards sessions may use."""

from __future__ import annotations

from meshnet.tracker.readiness import NOT_PROBED, Readiness


def test_a_shard_is_ready_once_it_is_proven() -> None:
    readiness = Readiness(probing=True)
    assert readiness.why_not("a") == NOT_PROBED
    assert not readiness.may_repair("a")
    readiness.prove(["a"])
    assert readiness.is_ready("a")
    assert readiness.may_repair("a")
    readiness.doubt(["a"], "its answer differs")
    assert readiness.why_not("a") == "its answer differs"
    assert not readiness.may_repair("a")


def test_a_shard_that_only_lacks_a_slot_for_its_probe_may_repair_a_route() -> None:
    readiness = Readiness(probing=True)
    readiness.await_slot(["a"], "b has no free session slot for a probe")
    assert not readiness.is_ready("a")
    assert readiness.why_not("a") == "b has no free session slot for a probe"
    assert readiness.may_repair("a")
    readiness.doubt(["a"], "it cannot be reached")
    assert not readiness.may_repair("a")
    readiness.await_slot(["a"], "b is full")
    readiness.forget(["a"])
    assert not readiness.may_repair("a")
    readiness.prove(["a"])
    readiness.await_slot(["a"], "too late")
    assert readiness.why_not("a") is None


def test_without_probing_every_shard_is_ready() -> None:
    assert Readiness(probing=False).is_ready("a")
