"""Triton kernels over a sealed layer; their launchers lie beside this folder, and `batched.py` is the slow form."""
