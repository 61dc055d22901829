"""What is to be deployed: artifacts, and for how many sessions of which length, how often."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.artifact.library import fits
from meshnet.core import MAX_SESSION_TOKENS
from meshnet.errors import UsageError
from meshnet.tracker.messages import PublishedArtifact

#: As a worker's own defaults.
DEFAULT_CONTEXT_TOKENS = 4096
DEFAULT_SESSIONS = 4
DEFAULT_REPLICAS = 1

_FORM = re.compile(r"(?P<artifact>.+?)(?::(?P<settings>[a-z]+=[^,]*(,[a-z]+=[^,]*)*))?")
_MOST = {"context": MAX_SESSION_TOKENS, "sessions": 4096, "replicas": 100}


@dataclass(frozen=True)
class Recipe:
    """``artifact`` is a digest, its first 8 digits or more, or a name. ``replicas``: shards that hold each layer."""

    artifact: str
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    sessions: int = DEFAULT_SESSIONS
    replicas: int = DEFAULT_REPLICAS

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read ``ARTIFACT[:context=N,sessions=K,replicas=R]``; settings that are not given are the defaults.

        Raises:
            UsageError: it is not of that form, or a number is out of bounds.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--deploy {text!r} is not ARTIFACT[:context=N,sessions=K,replicas=R]")
        values = {"context": DEFAULT_CONTEXT_TOKENS, "sessions": DEFAULT_SESSIONS, "replicas": DEFAULT_REPLICAS}
        for setting in (match["settings"] or "").split(","):
            if not setting:
                continue
            name, _, number = setting.partition("=")
            if name not in values:
                raise UsageError(f"--deploy {text!r}: there is no {name}; write context=N, sessions=K or replicas=R")
            if not number.isdecimal() or not 1 <= int(number) <= _MOST[name]:
                raise UsageError(f"--deploy {text!r}: {name} is a whole number from 1 to {_MOST[name]}")
            values[name] = int(number)
        return cls(match["artifact"], values["context"], values["sessions"], values["replicas"])


@dataclass(frozen=True)
class Wanted:
    """A recipe for one published artifact. ``context_tokens`` is no more than the model was trained for."""

    digest: str
    name: str
    context_tokens: int
    sessions: int
    replicas: int


def wanted_artifacts(recipes: Sequence[Recipe], published: Sequence[PublishedArtifact]) -> list[Wanted]:
    """What is to be deployed of what is published, in the order of the recipes; without recipes everything, in the
    order of its publication. A recipe that fits several artifacts means none."""
    if not recipes:
        in_order = sorted(published, key=lambda one: (one.published_unix_s, one.digest))
        return [_wanted(Recipe(one.digest), one) for one in in_order]
    found: dict[str, Wanted] = {}
    for recipe in recipes:
        fitting = _fitting(recipe, published)
        if len(fitting) == 1:
            found.setdefault(fitting[0].digest, _wanted(recipe, fitting[0]))
    return list(found.values())


def unmatched(recipes: Sequence[Recipe], published: Sequence[PublishedArtifact]) -> dict[str, int]:
    """What recipes ask for that is not clear: how many artifacts fit, none or several."""
    counts = {recipe.artifact: len(_fitting(recipe, published)) for recipe in recipes}
    return {artifact: count for artifact, count in counts.items() if count != 1}


def _fitting(recipe: Recipe, published: Sequence[PublishedArtifact]) -> list[PublishedArtifact]:
    return [one for one in published if fits(recipe.artifact, one.digest, one.name)]


def _wanted(recipe: Recipe, artifact: PublishedArtifact) -> Wanted:
    return Wanted(artifact.digest, artifact.name, recipe.context_tokens, recipe.sessions, recipe.replicas)
