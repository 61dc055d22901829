"""The clock that leases are measured on."""

from __future__ import annotations

from meshnet.tracker.clock import ListeningClock


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_runs_with_time_and_a_stall_counts_for_one_step() -> None:
    time = Time()
    clock = ListeningClock(2.0, clock=time)
    assert clock() == 0.0
    for _ in range(10):
        time.now_s += 1.0
        clock()
    assert clock() == 10.0
    time.now_s += 3600.0
    assert clock() == 12.0
    time.now_s += 0.5
    assert clock() == 12.5
