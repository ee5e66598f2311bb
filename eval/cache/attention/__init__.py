"""What reads a sealed layer: `naive.py` is the slow, obvious form; `batched.py` and `kernels/` are held equal to it."""
