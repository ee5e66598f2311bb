"""Every numbered figure and table of the five papers, each with the command that makes ours: python -m eval.papers."""
