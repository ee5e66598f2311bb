"""Synthetic long-context retrieval tasks: text in, samples out. No torch."""
