"""Timings side by side with what a user would use instead: ``python -m benchmarks.<name>``."""
