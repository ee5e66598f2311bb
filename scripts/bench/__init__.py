"""Measurements of time, memory and quality: python -m scripts.bench.NAME OUT."""

SHAPES = ("llama8b", "reference")  # models: random weights on a GPU, and the shipped one
