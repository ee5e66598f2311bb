"""Hydra configurations: train and eval hold what one command has, shared what both have."""
