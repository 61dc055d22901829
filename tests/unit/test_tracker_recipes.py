"""What an operator asks for, and what is wanted then."""

from __future__ import annotations

import pytest

from meshnet.errors import UsageError
from meshnet.tracker.messages import PublishedArtifact
from meshnet.tracker.recipes import Recipe, Wanted, unmatched, wanted_artifacts


def published(name: str, digit: str, at: int) -> PublishedArtifact:
    return PublishedArtifact(
        digest=f"sha256:{digit * 64}",
        name=name,
        architecture="llama",
        n_layer=8,
        size_bytes=100,
        n_files=1,
        info_hash=digit * 64,
        published_unix_s=at,
    )


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("smol", Recipe("smol")),
        ("smol:context=8192", Recipe("smol", context_tokens=8192)),
        (f"sha256:{'a' * 64}", Recipe(f"sha256:{'a' * 64}")),
        (f"sha256:{'a' * 64}:sessions=2,replicas=3", Recipe(f"sha256:{'a' * 64}", sessions=2, replicas=3)),
        ("org/name:v1:replicas=2,context=1,sessions=4096", Recipe("org/name:v1", 1, 4096, 2)),
    ],
)
def test_a_recipe_is_read(text: str, recipe: Recipe) -> None:
    assert Recipe.parse(text) == recipe


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not ARTIFACT"),
        ("m:context=0", "context is a whole number from 1 to 131072"),
        ("m:context=131073", "context is a whole number from 1 to 131072"),
        ("m:sessions=x", "sessions is a whole number from 1 to 4096"),
        ("m:replicas=", "replicas is a whole number from 1 to 100"),
        ("m:layers=3", "there is no layers"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Recipe.parse(text)


def test_without_recipes_everything_is_wanted_once_in_the_order_of_publication() -> None:
    found = wanted_artifacts((), [published("b", "b", 2), published("a", "a", 3), published("c", "c", 1)])
    assert [(one.name, one.replicas) for one in found] == [("c", 1), ("b", 1), ("a", 1)]


def test_recipes_choose_and_order() -> None:
    known = [published("a", "a", 1), published("b", "b", 2), published("twice", "c", 3), published("twice", "d", 4)]
    recipes = [Recipe("b", context_tokens=7, replicas=2), Recipe("a" * 8), Recipe("twice"), Recipe("unknown")]
    assert wanted_artifacts(recipes, known) == [
        Wanted(known[1].digest, "b", 7, 4, 2),
        Wanted(known[0].digest, "a", 4096, 4, 1),
    ]
    assert unmatched(recipes, known) == {"twice": 2, "unknown": 0}
