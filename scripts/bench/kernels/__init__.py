"""Decode attention of one layer, on random keys: each kernel beside dense attention, and the limit of reading."""
