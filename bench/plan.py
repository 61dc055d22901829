"""What is measured: sizes, threads, rounds."""

from __future__ import annotations

from dataclasses import dataclass

#: Sessions are opened for this much more than they need: capacity is a round number.
_CAPACITY_STEP_TOKENS = 256


@dataclass(frozen=True)
class Plan:
    """Sizes of one run. Decode is measured from context position ``decode_from`` on, ``decode_tokens`` tokens long;
    prefill is measured from an empty context. Threads are per process: of two shards only one decodes at a time, while
    both prefill at once."""

    rounds: int = 5
    decode_from: int = 512
    decode_tokens: int = 128
    #: 0 is as many as let whole-model llama.cpp decode fastest on this machine.
    decode_threads: int = 0
    prefill_tokens: int = 2048
    prefill_threads: int = 1
    #: Prefill chunk of the routes; 0 is the worker's default.
    chunk_tokens: int = 0
    #: Tokens of the generation from which the way of a token is told, hop by hop.
    breakdown_tokens: int = 512
    #: Tokens round a ring that computes nothing.
    ring_tokens: int = 2000
    #: A sample that others disturbed is measured again so often.
    retries: int = 2
    #: Waiting for a quiet machine, in all.
    patience_s: float = 300.0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a worker must be able to hold for one session."""
        needed = max(self.decode_from + self.decode_tokens + 1, self.prefill_tokens + 1, self.breakdown_tokens + 2)
        return -(-needed // _CAPACITY_STEP_TOKENS) * _CAPACITY_STEP_TOKENS


#: Small enough to be a test that everything runs; its numbers mean nothing.
QUICK = Plan(
    rounds=1,
    decode_from=16,
    decode_tokens=8,
    decode_threads=2,
    prefill_tokens=64,
    chunk_tokens=16,
    breakdown_tokens=8,
    ring_tokens=50,
    retries=0,
    patience_s=0.0,
)
