"""Scores of masks and methods, tabulated from the rows of evaluations."""
