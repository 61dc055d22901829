"""What the planner knows of a model: bytes and work per layer, cache per token, and where it may be cut.

Facts are read from a GGUF's header or a manifest (`meshnet.planner.model_reading`), or from a facts file in TOML for a
model that is not at hand (`ModelFacts.from_toml`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from meshnet.core import LayerRange, Name, Noun
from meshnet.errors import UsageError

#: Tokens of one step of a worker, unless it is told otherwise (`meshnet-shard --step-tokens`).
STEP_TOKENS = 512

#: Caches have a multiple of so many rows.
_ROWS = 256

Bytes = Annotated[int, Field(ge=0, le=2**60)]


class KvPart(Noun):
    """One cache of a layer: bytes per token of a session, of the last ``window_tokens`` only if that is given.

    A compressed cache has a row for every ``tokens_per_row`` tokens.
    """

    bytes_per_token: Annotated[float, Field(ge=0, le=2**40)]
    window_tokens: Annotated[int, Field(ge=1, le=2**32)] | None = None
    tokens_per_row: Annotated[int, Field(ge=1, le=2**20)] = 1

    def bytes_of(self, context_tokens: int, step_tokens: int) -> float:
        """Of one session that may grow to ``context_tokens``."""
        # A windowed cache holds the step that is being computed beside the window.
        tokens = context_tokens if self.window_tokens is None else min(context_tokens, self.window_tokens + step_tokens)
        unit = _ROWS * self.tokens_per_row
        return self.bytes_per_token * unit * -(-tokens // unit)


class LayerFacts(Noun):
    """One layer. ``active_bytes`` are the weights that one token reads, ``active_weights`` how many numbers they are.

    ``state_bytes`` is what a session takes whatever its length: recurrent state.
    """

    weight_bytes: Bytes
    active_bytes: Bytes
    active_weights: Bytes
    kv: tuple[KvPart, ...] = ()
    state_bytes: Bytes = 0

    def kv_bytes(self, context_tokens: int, step_tokens: int) -> float:
        """Of one session that may grow to ``context_tokens``."""
        return self.state_bytes + sum(part.bytes_of(context_tokens, step_tokens) for part in self.kv)


class ModelFacts(Noun):
    """A model as the planner sees it. All bytes are of one shard that has the thing."""

    name: Name
    architecture: Name
    n_layer: Annotated[int, Field(ge=1, le=100_000)]
    n_ctx_train: Annotated[int, Field(ge=1)] | None = None
    n_embd: Annotated[int, Field(ge=1, le=2**24)]
    n_vocab: Annotated[int, Field(ge=1, le=2**28)]
    #: Widest intermediate vector of a layer.
    n_wide: Annotated[int, Field(ge=1, le=2**28)]
    layers: tuple[LayerFacts, ...]
    #: Read by the shard of layer 0, by that of the last layer, and by every shard.
    head_bytes: Bytes
    tail_bytes: Bytes
    shared_bytes: Bytes = 0
    #: Bytes that both head and tail hold: the embedding of a model without an output matrix of its own.
    tied_bytes: Bytes = 0
    #: Weights that the tail reads for each sampled token; of one token, the head reads a row only.
    tail_active_bytes: Bytes = 0
    tail_active_weights: Bytes = 0
    #: Bytes per token that cross a cut.
    boundary_bytes: Bytes
    #: Bytes that a step computes in for each of its tokens and each token of the context: masks, scores.
    score_bytes: Annotated[int, Field(ge=0, le=4096)] = 2
    #: Layers before which the model may be cut.
    legal_cuts: tuple[int, ...]
    #: What was not known and had to be guessed, in words.
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ModelFacts:
        if len(self.layers) != self.n_layer:
            raise ValueError(f"facts of {len(self.layers)} layers, but the model has {self.n_layer}")
        if any(not 0 < cut < self.n_layer for cut in self.legal_cuts):
            raise ValueError(f"a cut lies outside the model's {self.n_layer} layers")
        if list(self.legal_cuts) != sorted(set(self.legal_cuts)):
            raise ValueError("cuts are not distinct and in order")
        return self

    @classmethod
    def from_toml(cls, path: Path) -> ModelFacts:
        """Read a facts file; its form is told in docs/planning.md.

        Raises:
            UsageError: it cannot be read, or an entry is wrong; the message names it.
        """
        try:
            told = tomllib.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from None
        try:
            spans = [_LayerSpan.model_validate(span, strict=False) for span in told.pop("layers", [])]
            n_layer = told.get("n_layer")
            if not isinstance(n_layer, int):
                raise UsageError(f"{path}: n_layer is missing or not a whole number")
            layers: list[LayerFacts | None] = [None] * min(n_layer, 100_000)
            for number, span in enumerate(spans):
                for layer in range(span.start, span.end, span.step):
                    if layer >= n_layer or layers[layer] is not None:
                        raise UsageError(f"{path}: layers.{number}: layer {layer} is told twice or not of the model")
                    layers[layer] = span.facts()
            if None in layers:
                raise UsageError(f"{path}: layers: nothing is told of layer {layers.index(None)}")
            if told.get("legal_cuts", "all") == "all":
                told["legal_cuts"] = range(1, n_layer)
            return cls.model_validate({**told, "layers": layers, "legal_cuts": tuple(told["legal_cuts"])})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise UsageError(f"{path}: {where}: {first['msg']}") from None

    @property
    def whole(self) -> LayerRange:
        return LayerRange(start=0, end=self.n_layer)

    @property
    def fingerprint(self) -> str:
        """Names the model by what it consists of, whatever it is called: measured speeds are kept under it."""
        return f"{self.architecture}:{self.n_layer}:{self.weight_bytes(self.whole)}"

    @property
    def ends(self) -> tuple[int, ...]:
        """Where a range may start or end, in order."""
        return (0, *self.legal_cuts, self.n_layer)

    def is_legal(self, layers: LayerRange) -> bool:
        """True if a shard of ``layers`` can be loaded."""
        ends = set(self.ends)
        return layers.start in ends and layers.end in ends

    def weight_bytes(self, layers: LayerRange) -> int:
        """Everything that a shard of ``layers`` maps; also what it fetches, up to rounding to pieces."""
        held = sum(layer.weight_bytes for layer in self._of(layers)) + self.shared_bytes
        if layers.start == 0:
            held += self.head_bytes
        if layers.end == self.n_layer:
            held += self.tail_bytes
        if layers.start == 0 and layers.end == self.n_layer:
            held -= self.tied_bytes
        return held

    def kv_bytes(self, layers: LayerRange, context_tokens: int, sessions: int, step_tokens: int = STEP_TOKENS) -> int:
        """Caches and states of ``sessions`` sessions of ``context_tokens`` each."""
        return round(sessions * sum(layer.kv_bytes(context_tokens, step_tokens) for layer in self._of(layers)))

    def buffer_bytes(self, layers: LayerRange, context_tokens: int, step_tokens: int = STEP_TOKENS) -> int:
        """An estimate, on the high side, of what one step computes in: vectors, attention scores, logits."""
        vectors = step_tokens * (5 * self.n_embd + 3 * self.n_wide + self.boundary_bytes // 2) * 4
        scores = self.score_bytes * step_tokens * context_tokens
        logits = 32 * self.n_vocab if layers.end == self.n_layer else 0
        return vectors + scores + logits

    def memory_bytes(self, layers: LayerRange, context_tokens: int, sessions: int) -> int:
        """Weights, caches and buffers of a shard."""
        return (
            self.weight_bytes(layers)
            + self.kv_bytes(layers, context_tokens, sessions)
            + self.buffer_bytes(layers, context_tokens)
        )

    def _of(self, layers: LayerRange) -> Sequence[LayerFacts]:
        return self.layers[layers.start : layers.end]


class _LayerSpan(LayerFacts):
    """One ``[[layers]]`` entry of a facts file: the layers ``range(start, end, step)``."""

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=1, le=100_000)]
    step: Annotated[int, Field(ge=1)] = 1

    def facts(self) -> LayerFacts:
        own: dict[str, Any] = {name: getattr(self, name) for name in LayerFacts.model_fields}
        return LayerFacts(**own)
