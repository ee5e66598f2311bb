"""Pretraining of the shipped reference model."""
