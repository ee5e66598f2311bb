"""What an evaluation leaves: one row per sample and method, in files that only grow."""
