"""Replay long-context benchmarks against compressed caches: one prefill, many methods."""
