"""Text of an answer: whole characters, stop strings over token borders, tokens aligned with text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.gateway.text import AnswerText, Delta, StopFinder
from meshnet.rpc.generated import shard_pb2 as pb


def token(piece: bytes) -> pb.GeneratedToken:
    return pb.GeneratedToken(piece=piece)


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[Delta], AnswerText]:
    text = AnswerText(stops)
    deltas = []
    for piece in pieces:
        deltas.append(text.push(token(piece)))
        if text.stopped:
            break
    deltas.append(text.finish())
    return deltas, text


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(borders)]


@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=30),
    st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_stop_strings_do_not_depend_on_how_text_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    deltas, answer = run(split(text.encode(), cuts), stops)
    expected, stopped = reference(text, stops)
    assert "".join(delta.text for delta in deltas) == expected
    assert answer.stopped == stopped


@given(st.text(max_size=40), st.lists(st.integers(0, 400), max_size=40))
def test_characters_are_never_broken(text: str, cuts: list[int]) -> None:
    deltas, _ = run(split(text.encode(), cuts), [])
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas) or "\ufffd" in text


@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=30),
    st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_every_token_comes_once_in_order_with_its_first_character(text: str, stops: list[str], cuts: list[int]) -> None:
    pieces = split(text.encode(), cuts)
    deltas, answer = run(pieces, stops)
    sent = 0
    seen: list[bytes] = []
    for delta in deltas:
        start, sent = sent, sent + len(delta.text)
        for placed in delta.tokens:
            assert placed.offset < sent or not answer.stopped
            assert placed.offset >= start
            seen.append(placed.token.piece)
    assert seen == pieces[: len(seen)]
    if not answer.stopped:
        assert seen == pieces


def test_invalid_bytes_become_replacement_characters() -> None:
    deltas, _ = run([b"a\xff", b"\xf0\x9f", b"b"], [])
    assert "".join(delta.text for delta in deltas) == "a\ufffd\ufffdb"


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    deltas, _ = run([b"a", "\u20ac".encode()[:2]], [])
    assert [delta.text for delta in deltas] == ["a", "", "\ufffd"]
    assert [placed.token.piece for placed in deltas[-1].tokens] == [b"\xe2\x82"]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["</end>"])
    assert finder.push("hello <") == ("hello ", False)
    assert finder.push("/en") == ("", False)
    assert finder.push("v") == ("</env", False)
    assert finder.push("</end") == ("", False)
    assert finder.flush() == "</end"


def test_tokens_of_the_stop_string_are_left_out_and_a_half_used_one_is_kept() -> None:
    deltas, answer = run([b"one", b" two<", b"st", b"op>", b"never"], ["<stop>"])
    assert answer.stopped
    assert "".join(delta.text for delta in deltas) == "one two"
    placed = [placed for delta in deltas for placed in delta.tokens]
    assert [(each.offset, each.token.piece) for each in placed] == [(0, b"one"), (3, b" two<")]


def test_tokens_without_text_are_not_lost() -> None:
    deltas, _ = run([b"", b"a", b""], [])
    assert [placed.token.piece for delta in deltas for placed in delta.tokens] == [b"", b"a", b""]


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopFinder(["a", ""])
