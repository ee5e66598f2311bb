"""Axis *reads*: which part of the middle a decoding step reads. One method a file."""
