"""Where models may be cut, as far as the mesh has found out: shards that loaded, and ranges that engines refused."""

from __future__ import annotations

from collections import defaultdict

from meshnet.core import LayerRange, Shard
from meshnet.planner.model_facts import ModelFacts


class KnownCuts:
    """By artifact digest. What a worker says of its own layers is worth more than what was concluded."""

    def __init__(self) -> None:
        self._legal: defaultdict[str, set[int]] = defaultdict(set)
        self._illegal: defaultdict[str, set[int]] = defaultdict(set)
        self._refused: defaultdict[str, set[LayerRange]] = defaultdict(set)

    def learn(self, shard: Shard) -> None:
        """A worker serves this: its ends are legal; and if it names cuts inside, there are no others."""
        legal = self._legal[shard.artifact_digest]
        legal |= {shard.layers.start, shard.layers.end}
        if shard.cuts:
            inside = {cut.layer for cut in shard.cuts}
            legal |= inside
            self._illegal[shard.artifact_digest] |= set(range(shard.layers.start + 1, shard.layers.end)) - inside

    def refuse(self, digest: str, layers: LayerRange) -> None:
        """An engine cannot cut this range out."""
        self._refused[digest].add(layers)

    def applied(self, digest: str, facts: ModelFacts) -> ModelFacts:
        """``facts`` without the cuts that are known to be illegal, and with those that are known to be legal.

        Of a refused range, every end that nobody has cut at is taken for illegal.
        """
        legal = self._legal.get(digest, set())
        illegal = set(self._illegal.get(digest, ()))
        for layers in self._refused.get(digest, ()):
            illegal |= {layers.start, layers.end}
        cuts = (set(facts.legal_cuts) | legal) - (illegal - legal)
        told = tuple(sorted(cut for cut in cuts if 0 < cut < facts.n_layer))
        return facts if told == facts.legal_cuts else facts.model_copy(update={"legal_cuts": told})
