"""What reads a compressed layer: `batched.py` in plain PyTorch, `kernels/` in Triton."""
