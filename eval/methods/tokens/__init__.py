"""Axis *tokens*: which tokens of the middle stay. One method a file."""
