"""Hydra groups of python -m eval, and its main configuration, eval.yaml."""
