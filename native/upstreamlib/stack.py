"""The rules for the patch stack: small, and no model builder is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from upstreamlib.pins import Layout, Pins
from upstreamlib.shell import PatchFailed, git


@dataclass(frozen=True)
class PatchSize:
    """What one patch adds and where."""

    file: str
    added_lines: int
    paths: tuple[str, ...]


def sizes(layout: Layout, pins: Pins) -> list[PatchSize]:
    """Added lines and touched paths per patch, as git counts them.

    Asked from outside the repository: inside it, git drops the paths that are not below the current folder.
    """
    result = []
    for patch in pins.patches:
        added_lines = 0
        paths = []
        for entry in git(Path("/"), "apply", "--numstat", "-z", str(layout.patches / patch.file)).split("\0"):
            if entry:
                added, _, path = entry.split("\t")
                added_lines += int(added) if added.isdecimal() else 0
                paths.append(path)
        result.append(PatchSize(patch.file, added_lines, tuple(paths)))
    return result


def check(layout: Layout, pins: Pins) -> str:
    """Hold the stack to the limits of upstream.toml; one line about it.

    Raises:
        PatchFailed: too many added lines, or a path that must stay untouched.
    """
    found = sizes(layout, pins)
    for patch in found:
        touched = [path for path in patch.paths if path.startswith(pins.untouched)]
        if touched:
            raise PatchFailed(f"{patch.file} touches {', '.join(touched)}, which upstream.toml keeps untouched")
    added_lines = sum(patch.added_lines for patch in found)
    if added_lines > pins.max_added_lines:
        raise PatchFailed(f"the patch stack adds {added_lines} lines; upstream.toml allows {pins.max_added_lines}")
    return f"{len(found)} patches, {added_lines} of at most {pins.max_added_lines} added lines"
