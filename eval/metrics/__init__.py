"""Benchmark scorers and graders: text in, number out. No torch, no model, no data.

Each module reproduces the benchmark's official scorer, quirks included (docs/benchmarks.md lists them); a knowing
difference is a keyword argument whose default is the official behaviour.
"""
