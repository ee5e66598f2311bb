"""Every numbered figure and table of five papers, with the command that makes it: python -m leank.eval.papers."""

from leank.extras import require

require("leank.eval.papers", "eval", "hydra", "pandas")
