"""``meshnet artifact list``, ``verify`` and ``remove``: what the store holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.cli.progress import progress_of

if TYPE_CHECKING:
    from meshnet.artifact.stored import Damage, StoredArtifact, Writer

#: Damaged pieces that people are told of one by one; a file of another model has nothing but.
MAX_TOLD = 20
#: Of a digest, for people: more than enough to tell artifacts apart, and to name one by.
DIGITS = 12

WantedArgument = Annotated[str, typer.Argument(metavar="DIGEST|NAME", help="As `meshnet artifact list` shows them.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as JSON, in bytes.")]


def list_(json_: JsonOption = False) -> None:
    """List the artifacts in the store, and how much of each is there."""
    from meshnet.artifact.library import Library
    from meshnet.cli.show import console, size, table

    library = Library()
    held = library.all()
    entries = [_entry(stored) for stored in held]
    if json_:
        print(json.dumps(entries))
        return
    if not entries:
        print(f"the store {library.root.parent} holds no artifact")
        return
    rows = [
        (
            entry["name"],
            entry["digest"].removeprefix("sha256:")[:DIGITS],
            size(entry["size_bytes"]),
            size(entry["verified_bytes"]),
            size(entry["disk_bytes"]),
            _place(stored),
        )
        for stored, entry in zip(held, entries, strict=True)
    ]
    columns = ("name", "digest", "size", "verified", "on the disk", "served from")
    console().print(table(f"Artifacts in {library.root.parent}", columns, rows, right=columns[2:5]))


def verify(wanted: WantedArgument, json_: JsonOption = False) -> None:
    """Hash what is recorded as there, and name what is damaged: file, tensor, layer. Exit code 1 if anything is.

    Damaged pieces are taken off the record: the next pull, or the node that runs, fetches them again.
    """
    from meshnet.artifact.library import Library

    library = Library()
    stored = library.need(wanted)
    with library.holding(stored), stored.writing() as writer:
        recorded = stored.verified()
        with progress_of(f"verifying {stored.bundle.manifest.name}") as progress:
            damage = _check(stored, writer, progress)
    if json_:
        print(json.dumps(_verified(stored, recorded, damage)))
    else:
        _print_verified(stored, recorded, damage, in_use=writer is None)
    if damage:
        raise typer.Exit(1)


def remove(wanted: WantedArgument) -> None:
    """Delete an artifact from the store. Files that are only served where they are stay."""
    from meshnet.artifact.library import Library
    from meshnet.cli.show import size

    library = Library()
    stored = library.need(wanted)
    freed_bytes = library.remove(stored)
    what = f"{size(freed_bytes)} freed" if stored.links is None else f"{stored.links[0]} is left alone"
    print(f"removed {stored.bundle.manifest.name} ({stored.digest}) from the store; {what}")


def _place(stored: StoredArtifact) -> str:
    if stored.links is None:
        return "the store"
    if not all(path.exists() for path in stored.links):
        return f"{stored.links[0]} (missing)"
    return f"{stored.links[0]}" if stored.is_unchanged() else f"{stored.links[0]} (changed)"


def _check(stored: StoredArtifact, writer: Writer | None, progress: Callable[[int, int], None]) -> list[Damage]:
    if writer is None:
        # Whoever has it looks after it: finds what is damaged by itself, and repairs it.
        return stored.check(stored.verified(), progress)[1]
    return writer.recover(progress, doubt=True)


def _verified(stored: StoredArtifact, recorded: frozenset[int], damage: list[Damage]) -> dict[str, Any]:
    return {
        "digest": stored.digest,
        "name": stored.bundle.manifest.name,
        "checked_bytes": stored.bundle.pieces.bytes_of(recorded),
        "damage": [
            {
                "piece": one.piece,
                "path": str(one.path),
                "start": one.span.start,
                "end": one.span.end,
                "parts": list(one.parts),
            }
            for one in damage
        ],
    }


def _print_verified(stored: StoredArtifact, recorded: frozenset[int], damage: list[Damage], *, in_use: bool) -> None:
    from meshnet.cli.show import size

    for one in damage[:MAX_TOLD]:
        print(f"damaged: {one}")
    if len(damage) > MAX_TOLD:
        print(f"damaged: {len(damage) - MAX_TOLD} more pieces")
    name, pieces = stored.bundle.manifest.name, stored.bundle.pieces
    told = f"{name}: {size(pieces.bytes_of(recorded))} checked"
    if not damage:
        print(f"{told}, all right")
        return
    if stored.links is not None:
        cure = "the store cannot repair what is not its own: bring the file back, or remove the artifact"
    elif in_use:
        cure = "the process that has it fetches them again"
    else:
        cure = f"`meshnet artifact pull {name}` fetches them again"
    print(f"{told}, {len(damage)} of {len(recorded)} pieces damaged; {cure}")


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
