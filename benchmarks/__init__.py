"""Programs that measure, each `python -m benchmarks.NAME`."""
