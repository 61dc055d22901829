"""``meshnet measure``: what a model costs on this machine, as an entry of nodes.toml."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshnet.node.measuring import Measured
    from meshnet.planner.model_facts import ModelFacts


def measure(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file that this machine can hold as a whole.")],
    threads: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Compute threads of a worker. [default: all cores]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the entry. [default: this machine's]")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of which medians are taken.")] = 3,
) -> None:
    """Measure a model on this machine, and print an entry for nodes.toml. Runs workers on loopback."""
    from meshnet.engines.native import find_worker
    from meshnet.node.measuring import measure as run
    from meshnet.planner.model_reading import facts_of_file

    facts = facts_of_file(path)
    n_threads = threads or len(os.sched_getaffinity(0))
    measured = asyncio.run(
        run(
            find_worker(),
            path,
            facts,
            threads=n_threads,
            rounds=rounds,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    print(stanza(name or _machine_name(), n_threads, facts, measured))


def stanza(name: str, threads: int, facts: ModelFacts, measured: Measured) -> str:
    """A ``[[nodes]]`` entry in TOML."""
    figures = measured.speed.model_dump(exclude={"model"})
    return "\n".join(
        [
            "[[nodes]]",
            f'name = "{name}"',
            f"memory_bytes = {_memory_bytes()}",
            f"threads = {threads}",
            f"at_once = {measured.at_once}",
            f"crowded = {measured.crowded}",
            "",
            "[[nodes.measured]]",
            f'model = "{facts.fingerprint}"  # {facts.name}',
            *(f"{key} = {value}" for key, value in figures.items()),
        ]
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine_name() -> str:
    """The host's name in the letters that names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node()).strip("-._")[:100] or "here"
