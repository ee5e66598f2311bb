"""Axis *prefill*: passes that drop tokens on their way up. One method a file."""
