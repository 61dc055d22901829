"""Settings of the Python interpreter for a server that answers thousands of small calls with few pauses."""

from __future__ import annotations

import gc
import sys

#: How long a thread may compute while another one waits for the interpreter. Every statement of the database's thread
#: waits for its turn: with Python's own 5 ms a transaction of a dozen takes tens of them while calls keep coming.
SWITCH_S = 0.0005

#: New objects between two collections of the youngest, and how many of those to one of the next generation. What a
#: server drops is freed by its reference count, cycles are few; so the larger generations are looked through seldom.
THRESHOLDS = (2_000, 100, 50)


def settle() -> None:
    """To be called once everything is loaded. What is there now stays for good, and is not looked through again: a full
    collection of all modules and tables stops every call for some hundred milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
