"""Oracles, tiny models and runs that several tests share."""
