"""nodes.toml: the machines that a plan may use, how fast they are, and the network between them."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshnet.core import Digest, LayerRange, Name
from meshnet.errors import UsageError
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.offers import Link, Links
from meshnet.planner.predict import CHUNK_TOKENS, Speed

#: A step of a shard beside its layers, and sampling beside the head matrix, where nothing is measured.
_STEP_US = 300.0
_SAMPLER_US = 100.0

#: Far below anything that exists; what is smaller would overflow as its reciprocal.
Positive = Annotated[float, Field(ge=1e-6, le=1e18)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]


class _Entry(BaseModel):
    """Strict, unlike what comes from peers: in a file that a person writes, an unknown key is a slip."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasuredSpeed(_Entry):
    """What ``meshnet measure`` found for one model on one machine; see `meshnet.planner.predict.Speed`."""

    model: Digest
    prefill_us: Positive
    decode_us: Positive
    prefill_us_per_token: NotNegative = 0.0
    decode_us_per_token: NotNegative = 0.0
    step_us: NotNegative = 0.0
    sample_us: NotNegative = 0.0

    def speed(self) -> Speed:
        return Speed(
            prefill_us=self.prefill_us,
            decode_us=self.decode_us,
            prefill_us_per_token=self.prefill_us_per_token,
            decode_us_per_token=self.decode_us_per_token,
            step_us=self.step_us,
            sample_us=self.sample_us,
        )


class NodeEntry(_Entry):
    """One machine. Without a measurement of the model, bandwidth and arithmetic tell its speed."""

    name: Name
    memory_bytes: Annotated[int, Field(ge=1, le=2**60)]
    disk_bytes: Annotated[int, Field(ge=0, le=2**60)] | None = None
    threads: Annotated[int, Field(ge=1, le=10_000)] = 1
    memory_bytes_per_s: Positive | None = None
    flops_per_s: Positive | None = None
    #: Workers that compute at full speed side by side, and how much longer each takes while several do.
    at_once: Annotated[int, Field(ge=1, le=10_000)] = 1
    crowded: Annotated[float, Field(ge=1, le=100)] = 1.0
    measured: tuple[MeasuredSpeed, ...] = ()

    def can_tell(self, facts: ModelFacts) -> bool:
        """True if the speed of ``facts`` on this machine is known, one way or the other."""
        return self._measured(facts) is not None or (
            self.memory_bytes_per_s is not None and self.flops_per_s is not None
        )

    def speed(self, facts: ModelFacts, layers: LayerRange) -> Speed:
        """Costs of ``layers`` here: measured, or else what reading weights and computing with them takes.

        Raises:
            UsageError: the entry gives neither.
        """
        measured = self._measured(facts)
        if measured is not None:
            return measured.speed()
        if self.memory_bytes_per_s is None or self.flops_per_s is None:
            raise UsageError(
                f"node {self.name}: neither measured for {facts.fingerprint} (`meshnet measure`) "
                "nor memory_bytes_per_s and flops_per_s"
            )
        held = facts.layers[layers.start : layers.end]
        n_bytes = sum(layer.active_bytes for layer in held) / len(held)
        n_weights = sum(layer.active_weights for layer in held) / len(held)
        cached = sum(part.bytes_per_token for layer in held for part in layer.kv if part.window_tokens is None)
        cached /= len(held)
        # The tokens of a chunk read weights once between them, but those of all the experts that any of them uses.
        chunk_bytes = sum(layer.weight_bytes for layer in held) / len(held) / CHUNK_TOKENS
        return Speed(
            # Two operations per weight. Reading the cache is all of attention that grows with the context; a prompt's
            # tokens read it together, but each computes with it.
            prefill_us=1e6 * max(chunk_bytes / self.memory_bytes_per_s, 2.0 * n_weights / self.flops_per_s),
            decode_us=1e6 * max(n_bytes / self.memory_bytes_per_s, 2.0 * n_weights / self.flops_per_s),
            prefill_us_per_token=1e6 * 2.0 * cached / self.flops_per_s,
            decode_us_per_token=1e6 * cached / self.memory_bytes_per_s,
            step_us=_STEP_US,
            sample_us=_SAMPLER_US + 1e6 * facts.tail_active_bytes / self.memory_bytes_per_s,
            measured=False,
        )

    def _measured(self, facts: ModelFacts) -> MeasuredSpeed | None:
        return next((one for one in self.measured if one.model in (facts.fingerprint, facts.name)), None)


class LinkEntry(_Entry):
    """The way between two machines, the same in both directions."""

    between: tuple[Name, Name]
    rtt_ms: Annotated[float, Field(ge=0, le=1e6)]
    bytes_per_s: Positive | None = None


class NetworkEntry(_Entry):
    """Between any two machines that no ``[[links]]`` entry names."""

    rtt_ms: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    bytes_per_s: Positive = 117e6


class NodesFile(_Entry):
    """A whole nodes.toml."""

    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1, max_length=10_000)]
    links: tuple[LinkEntry, ...] = ()
    network: NetworkEntry = NetworkEntry()

    @model_validator(mode="after")
    def _consistent(self) -> NodesFile:
        names = Counter(node.name for node in self.nodes)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"two nodes are called {twice[0]}")
        for number, link in enumerate(self.links):
            for name in link.between:
                if name not in names:
                    raise ValueError(f"links.{number}: there is no node {name}")
        return self

    @classmethod
    def read(cls, path: Path) -> NodesFile:
        """Read and check nodes.toml.

        Raises:
            UsageError: it cannot be read, or an entry is wrong; the message names every one of them.
        """
        try:
            told = tomllib.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from None
        try:
            return cls.model_validate(told)
        except ValidationError as error:
            raise UsageError(f"{path}: {_faults(error, told)}") from None

    def all_links(self) -> Links:
        """Every pair of machines, in both directions."""
        default = Link(self.network.rtt_ms, self.network.bytes_per_s)
        links = {(a.name, b.name): default for a in self.nodes for b in self.nodes}
        for link in self.links:
            measured = Link(link.rtt_ms, link.bytes_per_s or self.network.bytes_per_s)
            links[link.between] = links[link.between[::-1]] = measured
        return links


def _faults(error: ValidationError, told: dict[str, object]) -> str:
    """Each wrong entry by its place, a node also by its name."""
    found = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False)[:10]:
        where = ".".join(map(str, fault["loc"]))
        nodes = told.get("nodes")
        if len(fault["loc"]) > 1 and fault["loc"][0] == "nodes" and isinstance(nodes, list):
            entry = nodes[int(fault["loc"][1])]
            name = entry.get("name") if isinstance(entry, dict) else None
            where += f" (node {name})" if isinstance(name, str) else ""
        found.append(f"{where}: {fault['msg']}" if where else fault["msg"].removeprefix("Value error, "))
    return "; ".join(found)
