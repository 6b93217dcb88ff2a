"""Benchmarks, outside the wheel: ``README.md`` lists them, and each runs as ``python -m benchmarks NAME``."""
