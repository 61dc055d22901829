#!/usr/bin/env python3
"""The pinned llama.cpp: fetch, check, patch, build. `upstream.toml` says what, `--help` how."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from upstreamlib import build, pins, stack, tree
from upstreamlib.pins import Layout
from upstreamlib.shell import UpstreamError, need_tools, only_one, say


def fetch(layout: Layout, options: argparse.Namespace) -> None:
    """Get the pinned commit, apply the patches; nothing to do if that is done."""
    with only_one(layout.lock):
        tree.ensure(layout, pins.load_checked(layout), layout.tree, discard=options.discard)


def verify(layout: Layout, _: argparse.Namespace) -> None:
    """Check that the tree is exactly the pinned commit with the pinned patches."""
    pinned = pins.load_checked(layout)
    tree.verify(pinned, layout.tree)
    print(pinned.compatibility_id)


def status(layout: Layout, _: argparse.Namespace) -> None:
    """Show what is pinned and what state the tree is in."""
    pinned = pins.load_checked(layout)
    print(f"commit   {pinned.commit}")
    for size in stack.sizes(layout, pinned):
        print(f"patch    {size.file}: {size.added_lines} added lines in {len(size.paths)} files")
    if not pinned.patches:
        print("patch    none")
    print(f"tree     {tree.describe(pinned, layout.tree)}")
    print(f"worker   {'built' if (layout.build / 'bin' / 'meshnet-shard').is_file() else 'not built'}")


def build_native(layout: Layout, options: argparse.Namespace) -> None:
    """Build native/ against the patched tree, into build/native."""
    need_tools(*build.TOOLS)
    pinned = pins.load_checked(layout)
    compatibility_id = pinned.compatibility_id
    changes = tree.changes_digest(layout.tree) if options.dirty else None
    if changes is None:
        tree.verify(pinned, layout.tree)
    else:
        compatibility_id += f"+dirty-{changes}"
        say("building a tree with changes that no patch holds; its compatibility id says so")
    settings = [
        *build.common_settings(pinned),
        f"MESHNET_LLAMA_DIR={layout.tree}",
        f"MESHNET_COMPATIBILITY_ID={compatibility_id}",
        f"MESHNET_BUILD_ID={build.build_id(pinned, compatibility_id)}",
    ]
    build.run(layout.root, layout.native, layout.build, settings, options.target)


def build_unpatched(layout: Layout, options: argparse.Namespace) -> None:
    """Build targets of llama.cpp itself without patches, into build/upstream-pristine/build/bin."""
    need_tools(*build.TOOLS)
    pinned = pins.load(layout).unpatched()
    path = layout.pristine_tree
    with only_one(layout.lock):
        tree.ensure(layout, pinned, path)
    settings = [*build.common_settings(pinned), f"MESHNET_LLAMA_DIR={path}"]
    build.run(layout.root, layout.native / "pristine", layout.pristine / "build", settings, options.target)


def seal(layout: Layout, _: argparse.Namespace) -> None:
    """Write the hashes of the files in native/patches into upstream.toml."""
    with only_one(layout.lock):
        print(pins.seal(layout).compatibility_id)


def export(layout: Layout, options: argparse.Namespace) -> None:
    """Write the commits made in the tree as the patch stack, and seal it."""
    with only_one(layout.lock):
        pinned = pins.load(layout)
        sealed = tree.export(layout, pinned, layout.tree, message=options.message, amend=options.amend)
    print(sealed.compatibility_id)


def check(layout: Layout, _: argparse.Namespace) -> None:
    """Hold the patch stack to its limits: size, and files that stay untouched."""
    print(stack.check(layout, pins.load_checked(layout)))


def main(arguments: list[str], layout: Layout) -> int:
    """Run one command; 0, 1 with a named error on stderr, or 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="upstream.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    actions = {
        "fetch": fetch,
        "status": status,
        "verify": verify,
        "build": build_native,
        "unpatched": build_unpatched,
        "seal": seal,
        "export": export,
        "check": check,
    }
    parsers = {name: commands.add_parser(name, help=action.__doc__) for name, action in actions.items()}
    parsers["fetch"].add_argument("--discard", action="store_true", help="throw away changes in the tree")
    parsers["build"].add_argument("--target", nargs="+", default=[], help="what to build (default: everything)")
    parsers["unpatched"].add_argument("--target", nargs="+", required=True, help="targets of llama.cpp or ours")
    parsers["build"].add_argument(
        "--dirty", action="store_true", help="build the tree with changes that no patch holds yet"
    )
    parsers["export"].add_argument("--message", help="make a new last patch of uncommitted changes")
    parsers["export"].add_argument("--amend", action="store_true", help="add uncommitted changes to the last patch")
    options = parser.parse_args(arguments)
    try:
        actions[options.command](layout, options)
    except UpstreamError as error:
        print(f"upstream: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        name = "DiskFull" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "FileError"
        print(f"upstream: error: {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("upstream: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Layout(Path(__file__).resolve().parent.parent)))
