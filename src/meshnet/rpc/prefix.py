"""The running hash of a token prefix, as every hop computes it: see ``StepFrame.prefix_hash`` in shard.proto."""

from __future__ import annotations

from collections.abc import Iterable

_SEED = 0x6D6573686E657431
_MASK = (1 << 64) - 1


def prefix_hash(tokens: Iterable[int]) -> int:
    """Hash of all of ``tokens``, 64 bits."""
    value = _SEED
    for token in tokens:
        value ^= (token + 0x9E3779B97F4A7C15) & _MASK
        value ^= value >> 30
        value = value * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 27
        value = value * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value
