"""Hydra groups of python -m leank_train, and its main configuration, train.yaml."""
