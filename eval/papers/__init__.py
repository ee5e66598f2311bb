"""Every numbered figure and table of five papers, with the command that makes it: python -m leank.eval.papers."""
