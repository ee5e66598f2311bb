"""Triton kernels of the prefill."""
