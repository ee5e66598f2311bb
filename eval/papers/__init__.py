"""Every numbered figure and table of the five papers, each with the command that makes it: python -m eval.papers."""
