"""Axis *bits*: how the numbers of the middle are stored. One method a file."""
