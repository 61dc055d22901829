"""How far a long command is: a bar on a terminal, a line now and then elsewhere. On standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

#: How often a line is printed where there is no terminal.
LINE_EVERY_S = 2.0

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@contextlib.contextmanager
def progress_of(what: str) -> Iterator[Progress]:
    """Show the bytes that the given function is called with, while the block runs."""
    if sys.stderr.isatty():
        with _bar(what) as advance:
            yield advance
    else:
        yield _lines(what)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(file=sys.stderr, markup=False), transient=True) as bars:
        task = bars.add_task(what, total=None)

        def advance(done_bytes: int, total_bytes: int) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes)

        yield advance


def _lines(what: str) -> Progress:
    told_at = time.monotonic()

    def advance(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= LINE_EVERY_S:
            told_at = time.monotonic()
            print(f"{what}: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)

    return advance
