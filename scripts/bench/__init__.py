"""Benchmarks of time and memory; each is a command: python -m scripts.bench.NAME OUT."""
