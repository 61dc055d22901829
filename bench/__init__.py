"""Side-by-side timings of real processes on this machine; ``python -m bench --help``, docs/performance.md."""
