"""Axis *bits*: in how many bits the middle is stored. One method a file."""
