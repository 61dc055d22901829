"""Which answer to a probe is believed."""

from __future__ import annotations

import pytest

from meshnet.tracker.answers import MAX_NODES, Answer, Said, Standing, Verdict


def answer(*tokens: int, runner_up: dict[int, int] | None = None) -> Answer:
    """``runner_up`` gives by index the token that was about as likely."""
    close = runner_up or {}
    return Answer(said=tuple(Said(token=token, runner_up=close.get(index)) for index, token in enumerate(tokens)))


KNOWN = answer(1, 2, 3, 4)
OTHER = answer(1, 2, 9, 4)


@pytest.mark.parametrize(
    ("one", "two", "agree"),
    [
        (KNOWN, KNOWN, True),
        (KNOWN, OTHER, False),
        (KNOWN, answer(1, 2, 3), False),
        # 3 and 9 were about as likely, and what follows them cannot be compared.
        (answer(1, 2, 3, 4, runner_up={2: 9}), answer(1, 2, 9, 7), True),
        (KNOWN, answer(1, 2, 9, 7, runner_up={2: 3}), True),
        (answer(1, 2, 3, 4, runner_up={2: 9}), answer(1, 2, 8, 4), False),
        (answer(1, 2, 3, 4, runner_up={2: 9}), answer(1, 7, 3, 4), False),
    ],
)
def test_answers_agree_up_to_what_rounding_can_change(one: Answer, two: Answer, agree: bool) -> None:
    assert one.agrees(two) == agree
    assert two.agrees(one) == agree


def test_the_elder_of_two_is_believed() -> None:
    standing = Standing(KNOWN, ["n1", "n2"])
    assert standing.judge(KNOWN, ["n3", "n2"], ["n1", "n2"]) is Verdict.AGREES
    # Once or a hundred times, it is one machine.
    for _ in range(100):
        assert standing.judge(OTHER, ["n4", "n2"], ["n1", "n2"]) is Verdict.DIFFERS


def test_the_third_decides() -> None:
    # n1 holds the head and n2 the tail; n3 and n4 hold heads too, and disagree with n1.
    standing = Standing(KNOWN, ["n1", "n2"])
    assert standing.judge(OTHER, ["n3", "n2"], ["n1", "n2"]) is Verdict.DIFFERS
    assert standing.judge(OTHER, ["n4", "n2"], ["n1", "n2"]) is Verdict.OVERTURNS


def test_one_bad_hop_does_not_make_its_whole_route_a_majority() -> None:
    standing = Standing(KNOWN, ["n1"])
    assert standing.judge(OTHER, ["n2", "n3", "n4"], ["n1"]) is Verdict.DIFFERS
    assert standing.judge(OTHER, ["n2", "n5", "n6"], ["n1"]) is Verdict.DIFFERS
    assert standing.judge(OTHER, ["n5", "n7"], ["n1"]) is Verdict.OVERTURNS


def test_different_wrong_answers_do_not_add_up() -> None:
    standing = Standing(KNOWN, ["n1", "n2"])
    for number in range(3, 9):
        wrong = answer(1, 2, 3, 100 + number)
        assert standing.judge(wrong, [f"n{number}", "n2"], ["n1", "n2"]) is Verdict.DIFFERS


def test_an_answer_whose_nodes_are_gone_counts_as_one() -> None:
    standing = Standing(KNOWN, ["gone-1", "gone-2"])
    assert standing.judge(OTHER, ["n3"], []) is Verdict.DIFFERS
    assert standing.judge(OTHER, ["n4"], []) is Verdict.OVERTURNS


def test_an_answer_that_all_who_gave_it_take_back_is_given_up() -> None:
    standing = Standing(KNOWN, ["n1"])
    assert standing.judge(OTHER, ["n1"], ["n1"]) is Verdict.DIFFERS
    assert standing.judge(OTHER, ["n1"], []) is Verdict.OVERTURNS


def test_what_is_remembered_is_bounded() -> None:
    standing = Standing(KNOWN, [])
    for number in range(3 * MAX_NODES):
        standing.add([f"n{number}"])
        standing.judge(answer(number, 0, 0, 0), [f"n{number}"], [f"p{index}" for index in range(9)])
    assert len(standing.node_ids) == MAX_NODES
    assert len(standing.challengers) == MAX_NODES
    assert not standing.add([f"n{3 * MAX_NODES - 1}"])
