"""How much of this machine other processes take: timings made beside a compiler say little."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Others may take this share of all cores before a machine counts as busy, or a sample as disturbed.
BUSY_SHARE = 0.05
_WINDOW_S = 1.0


@dataclass(frozen=True)
class CpuTimes:
    """A moment: CPU seconds used by everything since boot, and by this process with all its descendants."""

    at_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuTimes:
        return cls(at_s=time.monotonic(), all_s=_all_cpu_s(), own_s=_own_cpu_s())

    def others_share(self, since: CpuTimes) -> float:
        """Share of all cores, 0 to 1, that other processes (or the hypervisor) took since then."""
        elapsed_s = self.at_s - since.at_s
        others_s = (self.all_s - since.all_s) - (self.own_s - since.own_s)
        return min(1.0, max(0.0, others_s / (elapsed_s * cores()))) if elapsed_s > 0 else 0.0


def cores() -> int:
    return os.cpu_count() or 1


class Patience:
    """Waits for a quiet machine, up to a budget of seconds for the whole run."""

    def __init__(self, budget_s: float) -> None:
        self._left_s = budget_s

    @property
    def exhausted(self) -> bool:
        return self._left_s <= 0

    async def wait_until_quiet(self) -> None:
        """Return once others have taken less than `BUSY_SHARE` for a second, or when the budget is used up."""
        while self._left_s > 0:
            began = CpuTimes.now()
            await asyncio.sleep(_WINDOW_S)  # the window that is looked at
            ended = CpuTimes.now()
            if ended.others_share(began) < BUSY_SHARE:
                return
            self._left_s -= ended.at_s - began.at_s


def _all_cpu_s() -> float:
    # user nice system idle iowait irq softirq steal: all but idle and iowait is time that somebody had.
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_S


def _own_cpu_s() -> float:
    own = os.times()
    total_s = own.user + own.system + own.children_user + own.children_system
    return total_s + sum(process.cpu_ticks for process in _descendants(os.getpid())) / TICKS_PER_S


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    cpu_ticks: int  # with those of its own children that it has waited for


def _descendants(pid: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := _process(int(name))) is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[_Process] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting.extend(children.get(process.pid, ()))
    return found


def _process(pid: int) -> _Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has just ended
    return _Process(pid, int(fields[1]), sum(int(text) for text in fields[11:15]))
