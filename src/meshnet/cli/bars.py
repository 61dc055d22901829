"""Several progress bars at once, for downloads of other processes. On standard output."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from meshnet.cli.progress import LINE_EVERY_S


class ByteBars:
    """Several bars, by name; made by `byte_bars`."""

    def __init__(self, advance: Callable[[str, int, int], None]) -> None:
        self.advance = advance


@contextlib.contextmanager
def byte_bars(names: Sequence[str]) -> Iterator[ByteBars]:
    """A bar per name on a terminal's standard output, otherwise a line now and then, and one at the end of each."""
    if not sys.stdout.isatty():
        yield ByteBars(_plain_bars())
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    with Progress(TextColumn("  {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}

        def advance(name: str, done_bytes: int, total_bytes: int) -> None:
            bars.update(tasks[name], completed=done_bytes, total=total_bytes)

        yield ByteBars(advance)


def _plain_bars() -> Callable[[str, int, int], None]:
    told: dict[str, tuple[float, int]] = {}

    def advance(name: str, done_bytes: int, total_bytes: int) -> None:
        at, told_bytes = told.get(name, (0.0, -1))
        now = time.monotonic()
        if (done_bytes == total_bytes and told_bytes != done_bytes) or now - at >= LINE_EVERY_S:
            told[name] = (now, done_bytes)
            print(f"  {name}: {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB", flush=True)

    return advance
