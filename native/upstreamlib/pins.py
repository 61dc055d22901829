"""upstream.toml: what is pinned, and where things are kept."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstreamlib.shell import BadPins, HashMismatch, WrongTree

_SEALED_FROM = "# The patch stack, in order."


@dataclass(frozen=True)
class Layout:
    """Paths of one checkout."""

    root: Path

    @property
    def native(self) -> Path:
        return self.root / "native"

    @property
    def pins(self) -> Path:
        return self.native / "upstream.toml"

    @property
    def patches(self) -> Path:
        return self.native / "patches"

    @property
    def workspace(self) -> Path:
        """Git-ignored; everything in it can be made again."""
        return self.root / "build" / "upstream"

    @property
    def tree(self) -> Path:
        return self.workspace / "llama.cpp"

    @property
    def build(self) -> Path:
        return self.root / "build" / "native"

    @property
    def pristine(self) -> Path:
        return self.root / "build" / "upstream-pristine"

    @property
    def pristine_tree(self) -> Path:
        """Seen from its build directory, the unpatched tree is where the patched one is seen from `build`.

        So the compiler cache recognises what the patches leave alone.
        """
        return self.pristine / "upstream" / "llama.cpp"

    @property
    def lock(self) -> Path:
        return self.root / "build" / ".upstream.lock"


@dataclass(frozen=True)
class SdistSource:
    """A source package that carries the tree and a (shallow) git directory for it."""

    requirement: str
    file: str
    sha256: str
    tree: str
    git_dir: str


@dataclass(frozen=True)
class GitSource:
    """The repository itself."""

    url: str


@dataclass(frozen=True)
class PatchPin:
    """One patch file and what it must hash to."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Pins:
    """The contents of upstream.toml."""

    commit: str
    sources: tuple[SdistSource | GitSource, ...]
    patches: tuple[PatchPin, ...]
    build_options: tuple[str, ...]
    max_added_lines: int
    untouched: tuple[str, ...]

    @property
    def stack_digest(self) -> str:
        """Names the patch stack by contents and order."""
        if not self.patches:
            return "unpatched"
        return hashlib.sha256("\n".join(patch.sha256 for patch in self.patches).encode()).hexdigest()[:16]

    @property
    def compatibility_id(self) -> str:
        """Equal on every hop of a route."""
        return f"{self.commit}+{self.stack_digest}"

    def unpatched(self) -> Pins:
        """The same upstream without patches."""
        return Pins(self.commit, self.sources, (), self.build_options, self.max_added_lines, self.untouched)


def load(layout: Layout) -> Pins:
    """Read upstream.toml.

    Raises:
        BadPins: missing or malformed; the message names the key.
    """
    try:
        table = tomllib.loads(layout.pins.read_text())
        commit = _text(table, "commit", r"[0-9a-f]{40}")
        sources = tuple(_source(entry) for entry in table["sources"])
        patches = tuple(
            PatchPin(_text(entry, "file", r"[A-Za-z0-9._+-]+\.patch"), _text(entry, "sha256", r"[0-9a-f]{64}"))
            for entry in table.get("patches", [])
        )
        options = tuple(str(option) for option in table["build"]["options"])
        limits = table["limits"]
        return Pins(commit, sources, patches, options, int(limits["max_added_lines"]), tuple(limits["untouched"]))
    except KeyError as error:
        raise BadPins(f"{layout.pins} has no {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise BadPins(f"{layout.pins}: {error}") from error


def load_checked(layout: Layout) -> Pins:
    """Read upstream.toml and check the patch files against it.

    Raises:
        BadPins, HashMismatch, WrongTree: as ``load`` and ``check_patch_files``.
    """
    pins = load(layout)
    check_patch_files(layout, pins)
    return pins


def check_patch_files(layout: Layout, pins: Pins) -> None:
    """Check that the patch directory holds exactly the pinned files.

    Raises:
        HashMismatch: a patch differs from its pin.
        WrongTree: a patch is missing or not listed.
    """
    for patch in pins.patches:
        path = layout.patches / patch.file
        if not path.is_file():
            raise WrongTree(f"{path} is listed in upstream.toml but missing; restore it, or run `upstream.py seal`")
        found = sha256_file(path)
        if found != patch.sha256:
            raise HashMismatch(
                f"{path} has sha256 {found}, upstream.toml says {patch.sha256}; "
                "if the change is meant, run `upstream.py seal`"
            )
    unlisted = sorted({path.name for path in layout.patches.glob("*.patch")} - {patch.file for patch in pins.patches})
    if unlisted:
        raise WrongTree(f"{', '.join(unlisted)} in {layout.patches} not listed; run `upstream.py seal` or remove")


def seal(layout: Layout) -> Pins:
    """Write the patch files of the patch directory, in name order, with their hashes into upstream.toml."""
    text = layout.pins.read_text()
    at = text.find(_SEALED_FROM)
    if at < 0:
        raise BadPins(f"{layout.pins} has no line that begins with {_SEALED_FROM!r}: cannot tell what to rewrite")
    lines = [text[: text.index("\n", at) + 1] if "\n" in text[at:] else f"{text}\n"]
    for path in sorted(layout.patches.glob("*.patch")):
        lines.append(f'[[patches]]\nfile = "{path.name}"\nsha256 = "{sha256_file(path)}"\n')
    sealed = "\n".join(lines)
    if sealed != text:
        layout.pins.write_text(sealed)
    return load(layout)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source(entry: dict[str, Any]) -> SdistSource | GitSource:
    kind = entry["kind"]
    if kind == "sdist":
        return SdistSource(
            requirement=_text(entry, "requirement", r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+"),
            file=_text(entry, "file", r"[A-Za-z0-9._-]+"),
            sha256=_text(entry, "sha256", r"[0-9a-f]{64}"),
            tree=_text(entry, "tree", r"[^/].*[^/]"),
            git_dir=_text(entry, "git_dir", r"[^/].*[^/]"),
        )
    if kind == "git":
        return GitSource(url=_text(entry, "url", r"[^-].*"))
    raise ValueError(f"source kind {kind!r} is neither 'sdist' nor 'git'")


def _text(entry: dict[str, Any], key: str, pattern: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise ValueError(f"{key} = {value!r} is not of the form {pattern}")
    return value
