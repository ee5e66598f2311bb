"""Sweeps: what is done, what runs again, and their tables: python -m scripts.sweep."""
