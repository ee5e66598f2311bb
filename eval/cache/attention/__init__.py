"""What reads a sealed layer: `batched.py` in plain PyTorch, `kernels/` in Triton."""
