"""Hydra groups of both commands."""
