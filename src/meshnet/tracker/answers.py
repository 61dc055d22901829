"""What routes of one artifact and build answer to the probe, and who is believed when answers differ: pure policy.

Every route computes the same, so all must answer alike. The first answer counts. Another one is taken for the right one
only if more routes, with no unproven machine in common, stand behind it than proven machines behind the known one
alone: with two copies of a range that differ the elder is believed, and the third decides. An answer that no proven
machine stands behind any more counts as one against a newcomer, and gives way if all who ever gave it now say
something else.

This finds a shard that computes wrong by accident or neglect. It is no defence against many machines that agree to lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from meshnet.core import Noun

#: Two builds of the same sources may differ in the last bits: where the best two tokens are this close (difference of
#: log-probabilities), either is right, and what follows cannot be compared.
CLOSE = 0.1

#: Most nodes remembered per answer.
MAX_NODES = 64


class Said(Noun):
    """One token of an answer. ``runner_up`` is the second best token if it was about as likely."""

    token: int
    runner_up: int | None = None


class Answer(Noun):
    """The tokens that a route gave for the probe's prompt."""

    said: tuple[Said, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(said.token for said in self.said)

    def agrees(self, other: Answer) -> bool:
        """Whether both can come of the same computation."""
        for mine, theirs in zip(self.said, other.said, strict=False):
            if mine.token != theirs.token:
                return theirs.token == mine.runner_up or mine.token == theirs.runner_up
        return len(self.said) == len(other.said)


class Verdict(Enum):
    """What a route's answer means."""

    FIRST = "first"
    AGREES = "agrees"
    DIFFERS = "differs"
    OVERTURNS = "overturns"  # this answer is the right one from now on


@dataclass
class Standing:
    """The right answer of an artifact and build, the nodes whose routes gave it, and those that gave another."""

    answer: Answer
    node_ids: list[str]
    #: By answer, the nodes of each route that gave it.
    challengers: dict[tuple[int, ...], list[frozenset[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, answer: Mapping[str, Any], node_ids: Sequence[str]) -> Standing:
        """Raises ``pydantic.ValidationError`` if it is not what `Answer` wrote."""
        return cls(Answer.model_validate(answer), list(node_ids))

    def add(self, node_ids: Collection[str]) -> bool:
        """These gave it too. Returns whether that is news."""
        room = MAX_NODES - len(self.node_ids)
        new = [node_id for node_id in dict.fromkeys(node_ids) if node_id not in self.node_ids][:room]
        self.node_ids = self.node_ids + new
        return bool(new)

    def judge(self, answer: Answer, node_ids: Collection[str], proven_on: Collection[str]) -> Verdict:
        """What it means that a route over these nodes gave ``answer``. ``proven_on``: nodes with a proven shard now."""
        if self.answer.agrees(answer):
            return Verdict.AGREES
        routes = self.challengers.pop(answer.tokens, [])
        if frozenset(node_ids) not in routes:
            routes = [*routes, frozenset(node_ids)][-MAX_NODES:]
        self.challengers[answer.tokens] = routes
        if len(self.challengers) > MAX_NODES:
            del self.challengers[next(iter(self.challengers))]
        behind = frozenset().union(*routes)
        for_known = frozenset(proven_on) - behind
        if _witnesses([route - frozenset(proven_on) for route in routes]) > max(1, len(for_known)):
            return Verdict.OVERTURNS
        if not proven_on and set(self.node_ids) <= behind:
            return Verdict.OVERTURNS
        return Verdict.DIFFERS


def _witnesses(routes: Sequence[frozenset[str]]) -> int:
    """How many of these do not depend on each other: one bad hop makes the answer of a whole route wrong."""
    counted: set[str] = set()
    count = 0
    for route in sorted(routes, key=len):
        if route and not route & counted:
            counted |= route
            count += 1
    return count
