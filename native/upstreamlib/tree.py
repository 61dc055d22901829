"""The work tree: the pinned commit with one commit per patch on top.

It is a real git work tree. `git log` shows the patch stack, `git diff` what was changed since. When the stack
changes, only files that differ between the old and the new stack are rewritten, so that the next build is small.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from upstreamlib import pins as pins_module
from upstreamlib import source
from upstreamlib.pins import Layout, Pins
from upstreamlib.shell import DirtyTree, PatchFailed, UpstreamError, WrongTree, git, need_space, timed, try_git

_NEED_BYTES = 400_000_000
_SHOWN_FILES = 10


@dataclass(frozen=True)
class _State:
    """What the tree was last set to; ``moving`` is true while files are being rewritten."""

    commit: str
    stack: str
    head: str
    moving: bool = False


def ensure(layout: Layout, pins: Pins, path: Path, *, discard: bool = False) -> None:
    """Make ``path`` the pinned commit plus patches. Does nothing if it is that already.

    Raises:
        DirtyTree, WrongTree: there is work in the tree that would be lost (``discard`` throws it away).
        PatchFailed: a patch does not apply.
    """
    repository = source.ensure(layout, pins)
    state = _read_state(path)
    if path.exists() and (state is None or state.commit != pins.commit):
        # Nothing of it can be kept: it has other files throughout.
        if not discard and state is not None:
            _refuse_changes(path, state)
        if not discard and state is None:
            raise WrongTree(f"{path} exists but was not made by upstream.py; move it away, or use --discard")
        shutil.rmtree(path)
    if not path.exists():
        state = _create(repository, pins.commit, path)
    if state is None:  # pragma: no cover - a tree that exists here has a state
        raise WrongTree(f"{path} has no state")
    if state.moving:
        discard = True  # a run was killed while it rewrote files; there was no work in the tree when it began
    elif not discard:
        _refuse_changes(path, state)
        if state.stack == pins.stack_digest:
            return
    head = _stack_head(layout, pins, path)
    _move(path, _State(pins.commit, pins.stack_digest, head), force=discard)


def verify(pins: Pins, path: Path) -> None:
    """Check that the tree is exactly the pinned commit with the pinned patches.

    Raises:
        WrongTree, DirtyTree: it is not; the message names files and what to do.
    """
    state = _read_state(path)
    if state is None:
        raise WrongTree(f"there is no llama.cpp tree at {path}; run `upstream.py fetch`")
    if state.moving:
        raise WrongTree(f"{path} was left half-way between two patch stacks; run `upstream.py fetch`")
    if state.commit != pins.commit or state.stack != pins.stack_digest:
        raise WrongTree(
            f"{path} is {state.commit[:12]}+{state.stack}, upstream.toml says "
            f"{pins.commit[:12]}+{pins.stack_digest}; run `upstream.py fetch`"
        )
    _refuse_changes(path, state)


def changes_digest(path: Path) -> str | None:
    """A digest of everything in the tree that differs from the pinned patch stack; None if nothing does."""
    state = _read_state(path)
    if state is None:
        raise WrongTree(f"there is no llama.cpp tree at {path}; run `upstream.py fetch`")
    if not _changed_files(path) and _head(path) == state.head:
        return None
    # A throw-away index, so that looking does not stage anything.
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        shutil.copyfile(path / ".git" / "index", index)
        git(path, "add", "--all", index=index)
        return git(path, "write-tree", index=index).strip()[:16]


def export(layout: Layout, pins: Pins, path: Path, *, message: str | None, amend: bool) -> Pins:
    """Write the tree's commits since the pinned one as the patch stack, one file each, and seal it.

    Uncommitted changes become a new last patch (``message``) or part of the last one (``amend``).

    Raises:
        DirtyTree: there are uncommitted changes, and neither was asked for.
        WrongTree: the tree's history does not begin at the pinned commit, or is not a line.
    """
    if _read_state(path) is None:
        raise WrongTree(f"there is no llama.cpp tree at {path}; run `upstream.py fetch`")
    changed = _changed_files(path)
    if changed:
        if message is None and not amend:
            raise DirtyTree(
                f"{_list(changed)} not committed; pass --message 'subject' to make a new patch of it, "
                "or --amend to add it to the last one"
            )
        if amend and _head(path) == pins.commit:
            raise WrongTree("there is no patch to amend; pass --message 'subject'")
        git(path, "add", "--all")
        git(
            path,
            "commit",
            "--quiet",
            *(["--amend", "--no-edit"] if amend else []),
            *(["-m", message] if message else []),
        )
    if try_git(path, "merge-base", "--is-ancestor", pins.commit, "HEAD")[0] != 0:
        raise WrongTree(f"HEAD of {path} does not descend from {pins.commit[:12]}; rebase your commits onto it")
    commits = git(path, "rev-list", "--reverse", f"{pins.commit}..HEAD").split()
    files: dict[str, str] = {}
    for number, commit in enumerate(commits, start=1):
        if len(git(path, "rev-list", "--parents", "-1", commit).split()) != 2:
            raise WrongTree(f"commit {commit[:12]} of {path} is a merge; rebase it into a line")
        text = git(path, "log", "-1", "--format=%B", commit).strip()
        slug = re.sub(r"[^a-z0-9]+", "-", text.splitlines()[0].lower()).strip("-")[:60].strip("-")
        diff = git(path, "diff", "--full-index", "--binary", "--no-renames", "--no-ext-diff", f"{commit}^", commit)
        files[f"{number:04d}-{slug}.patch"] = f"{text}\n---\n{diff}"
    layout.patches.mkdir(exist_ok=True)
    for old in layout.patches.glob("*.patch"):
        if old.name not in files:
            old.unlink()
    for name, contents in files.items():
        target = layout.patches / name
        if not target.is_file() or target.read_text() != contents:
            target.write_text(contents)
    sealed = pins_module.seal(layout)
    # Same files, but from now on HEAD is what every other machine makes of the patch files.
    _move(path, _State(sealed.commit, sealed.stack_digest, _stack_head(layout, sealed, path)), force=False)
    return sealed


def describe(pins: Pins, path: Path) -> str:
    """One line about the tree."""
    try:
        verify(pins, path)
    except UpstreamError as error:
        return f"{type(error).__name__}: {error}"
    return f"clean, {pins.compatibility_id}"


def _create(repository: Path, commit: str, path: Path) -> _State:
    need_space(path.parent, _NEED_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    with timed(f"checking out llama.cpp {commit[:12]}"):
        git(path.parent, "init", "--quiet", "--template=", partial)
        information = partial / ".git" / "objects" / "info"
        information.mkdir(exist_ok=True)
        # Relative, so that the checkout can be moved.
        borrowed = os.path.relpath(repository / "objects", partial / ".git" / "objects")
        (information / "alternates").write_text(f"{borrowed}\n")
        (partial / ".git" / "shallow").write_text(f"{commit}\n")
        git(partial, "checkout", "--quiet", "--detach", commit)
        state = _State(commit, "unpatched", commit)
        _write_state(partial, state)
        os.replace(partial, path)
    return state


def _stack_head(layout: Layout, pins: Pins, path: Path) -> str:
    """Commit each patch on top of the pinned commit without touching the work tree; the last commit."""
    head = pins.commit
    if not pins.patches:
        return head
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        git(path, "read-tree", head, index=index)
        for patch in pins.patches:
            file = layout.patches / patch.file
            code, _, err = try_git(path, "apply", "--cached", "--whitespace=nowarn", file.resolve(), index=index)
            if code != 0:
                raise PatchFailed(f"{patch.file} does not apply: {err.strip()}")
            tree = git(path, "write-tree", index=index).strip()
            head = git(path, "commit-tree", tree, "-p", head, "-m", _message(file)).strip()
    return head


def _message(patch: Path) -> str:
    header, separator, _ = patch.read_text().partition("\n---\n")
    return header.strip() if separator and not header.startswith("diff ") else patch.stem


def _move(path: Path, to: _State, *, force: bool) -> None:
    _write_state(path, _State(to.commit, to.stack, to.head, moving=True))
    if force:
        (path / ".git" / "index.lock").unlink(missing_ok=True)
        git(path, "checkout", "--quiet", "--force", "--detach", to.head)
        git(path, "clean", "-fdq")
    else:
        git(path, "checkout", "--quiet", "--detach", to.head)
    _write_state(path, to)


def _refuse_changes(path: Path, state: _State) -> None:
    changed = _changed_files(path)
    if changed:
        raise DirtyTree(
            f"{path} has changes that no patch holds: {_list(changed)}; "
            "keep them with `upstream.py export` or throw them away with `upstream.py fetch --discard`"
        )
    head = _head(path)
    if head != state.head:
        raise WrongTree(
            f"HEAD of {path} is {head[:12]}, not the patch stack {state.head[:12]}; "
            "keep your commits with `upstream.py export` or throw them away with `upstream.py fetch --discard`"
        )


def _head(path: Path) -> str:
    return git(path, "rev-parse", "HEAD").strip()


def _changed_files(path: Path) -> list[str]:
    return [entry[3:] for entry in git(path, "status", "--porcelain", "-z", "--no-renames").split("\0") if entry]


def _list(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
    return ", ".join(files[:_SHOWN_FILES]) + more


def _state_file(path: Path) -> Path:
    return path / ".git" / "meshnet-state.json"


def _read_state(path: Path) -> _State | None:
    try:
        return _State(**json.loads(_state_file(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write_state(path: Path, state: _State) -> None:
    target = _state_file(path)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(state.__dict__))
    os.replace(partial, target)
