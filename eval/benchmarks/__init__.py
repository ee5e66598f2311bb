"""Benchmark prompts: data in, `Row`s out, one schema for all benchmarks. No torch, no model."""
