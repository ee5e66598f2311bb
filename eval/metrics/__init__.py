"""Scores that several benchmarks share, and the comparison of MATH answers, which runs apart. No torch, no model."""
