"""Triton kernels of stored tokens."""
