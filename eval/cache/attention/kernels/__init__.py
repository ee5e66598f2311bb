"""Triton kernels over a sealed layer; the launchers lie beside this folder, and `naive.py` is the slow form of all."""
