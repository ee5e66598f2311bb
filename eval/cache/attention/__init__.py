"""What reads a sealed layer: the Triton kernel, plain PyTorch over all heads at once, and the slow reference."""
