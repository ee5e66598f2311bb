"""Arithmetic problems in the form of GSM-Infinite: their graph, their wording, and variables in place of words."""
