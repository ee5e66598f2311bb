"""Around a run: processes, signals, checkpoints, pictures, Weights & Biases."""
