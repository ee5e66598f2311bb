"""Axis *channels*: which K (and V) channels of the middle stay. One method a file."""
