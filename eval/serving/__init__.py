"""A plug-in for vLLM that serves a model with a channel-pruned cache; `check` says whether a server really does."""

from leank.eval.serving.guard import check

__all__ = ["check"]
