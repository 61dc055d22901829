"""``meshnet artifact list``, ``verify`` and ``remove``: what the store holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.cli.progress import progress_of

if TYPE_CHECKING:
    from meshnet.artifact.stored import Damage, StoredArtifact, Writer

WantedArgument = Annotated[str, typer.Argument(metavar="DIGEST|NAME", help="As `meshnet artifact list` shows them.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


def list_(json_: JsonOption = False) -> None:
    """List the artifacts in the store, and how much of each is there."""
    from rich.table import Table

    from meshnet.artifact.library import Library
    from meshnet.cli.show import console

    entries = [_entry(stored) for stored in Library().all()]
    if json_:
        print(json.dumps(entries))
        return
    table = Table("Name", "Digest", "Size", "Verified", "On disk", "Where")
    for entry in entries:
        table.add_row(
            entry["name"],
            entry["digest"][:23] + "…",
            _megabytes(entry["size_bytes"]),
            _megabytes(entry["verified_bytes"]),
            _megabytes(entry["disk_bytes"]),
            entry["paths"][0],
        )
    console().print(table if entries else "The store holds no artifact.")


def verify(wanted: WantedArgument, json_: JsonOption = False) -> None:
    """Hash what is recorded as there, and name what is damaged: file, tensor, layer. Exit code 1 if anything is.

    Damaged pieces are taken off the record, so that the next pull, or the node that runs, fetches them again.
    """
    from meshnet.artifact.library import Library

    library = Library()
    stored = library.need(wanted)
    with library.holding(stored), stored.writing() as writer:
        recorded = stored.verified()
        with progress_of("verifying") as progress:
            damage = _check(stored, writer, progress)
    if json_:
        print(json.dumps({"digest": stored.digest, "verified_pieces": len(recorded), "damage": list(map(str, damage))}))
    else:
        for one in damage:
            print(f"damaged: {one}")
        of_all = f"{stored.bundle.pieces.bytes_of(recorded) / 1e6:.1f} MB checked"
        print(f"{stored.bundle.manifest.name}: {of_all}, {len(damage)} damaged pieces")
    if damage:
        raise typer.Exit(1)


def remove(wanted: WantedArgument) -> None:
    """Delete an artifact from the store. Files that are only served where they are stay."""
    from meshnet.artifact.library import Library

    library = Library()
    stored = library.need(wanted)
    freed_bytes = library.remove(stored)
    print(f"removed {stored.bundle.manifest.name} ({stored.digest}): {_megabytes(freed_bytes)} freed")


def _check(stored: StoredArtifact, writer: Writer | None, progress: Callable[[int, int], None]) -> list[Damage]:
    if writer is None:
        # A node looks after it: it finds what is damaged by itself, and repairs it.
        return stored.check(stored.verified(), progress)[1]
    recorded = stored.verified()
    damage = writer.recover(progress)
    if not damage and recorded:
        damage = stored.check(writer.verified, progress)[1]
        if damage:
            writer.forget(one.piece for one in damage)
    return damage


def _entry(stored: StoredArtifact) -> dict[str, Any]:
    return {
        "name": stored.bundle.manifest.name,
        "digest": stored.digest,
        "size_bytes": stored.bundle.artifact.size_bytes,
        "verified_bytes": stored.bundle.pieces.bytes_of(stored.verified()),
        "disk_bytes": stored.disk_bytes(),
        "links": stored.links is not None,
        "paths": [str(path) for path in stored.paths],
    }


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"
