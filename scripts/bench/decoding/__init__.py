"""Tokens per second and bytes held of a whole model that decodes."""
