"""A plug-in for vLLM that serves a model with a channel-pruned cache; `check` says whether a server really does."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leank.eval.serving.guard import check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is asked for: --help of the commands needs no torch."""
    if name == "check":
        from leank.eval.serving.guard import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
