"""Hydra configuration groups; a package so that an installed copy finds them."""
