"""A training step: its cost, its speed on several GPUs, and whether several give the masks of one."""
