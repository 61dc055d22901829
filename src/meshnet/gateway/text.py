"""From generated tokens to the text a client may see.

``AnswerText`` takes tokens one by one and gives back deltas: whole characters only, never a part of a stop string, and
with each delta the tokens whose text it begins, so that log-probabilities stay aligned with the text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.rpc.generated import shard_pb2 as pb


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, and the number of characters of the answer before its first byte."""

    offset: int
    token: pb.GeneratedToken


@dataclass(frozen=True, slots=True)
class Delta:
    """Text to send now, and the tokens whose first character is in it. Both may be empty."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class StopFinder:
    """Finds the stop string that is completed first, however the text is split into pieces.

    Of stop strings completed at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text. Returns the text that can be sent now, and whether a stop string was found.

        Text that may yet turn out to be the beginning of a stop string is held back.
        """
        text = self._held + text
        found: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found):
                found = (start + len(stop), start)
        if found is not None:
            self._held = ""
            return text[: found[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The held text: no more comes, so it was no stop string."""
        text, self._held = self._held, ""
        return text


class AnswerText:
    """The text of one answer, token by token."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        # Bytes that are no UTF-8 become U+FFFD; a character that is not complete yet waits for its other bytes.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._finder = StopFinder(stops)
        self._waiting: deque[PlacedToken] = deque()
        self._decoded_chars = 0
        self._sent_chars = 0
        self.stopped = False

    def push(self, token: pb.GeneratedToken) -> Delta:
        """Take the next token. After a stop string is found (``stopped``) everything is ignored."""
        if self.stopped:
            return Delta()
        self._waiting.append(PlacedToken(self._decoded_chars, token))
        return self._take(self._decoder.decode(token.piece))

    def finish(self) -> Delta:
        """What is still held when no more tokens come, incomplete characters as U+FFFD."""
        if self.stopped:
            return Delta()
        delta = self._take(self._decoder.decode(b"", final=True))
        if self.stopped:
            return delta
        tokens = delta.tokens + tuple(self._waiting)
        self._waiting.clear()
        return Delta(delta.text + self._finder.flush(), tokens)

    def _take(self, text: str) -> Delta:
        self._decoded_chars += len(text)
        ready, self.stopped = self._finder.push(text)
        self._sent_chars += len(ready)
        tokens = []
        while self._waiting and self._waiting[0].offset < self._sent_chars:
            tokens.append(self._waiting.popleft())
        return Delta(ready, tuple(tokens))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
