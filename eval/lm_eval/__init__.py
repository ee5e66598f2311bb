"""lm-evaluation-harness on a model with a compressed cache; it needs the extra lm_eval.

    python -m leank.eval.lm_eval --tasks hellaswag --model_args method=leank,mask=PATH,model.name=/path/to/model

This is lm_eval's own command line, with all of its options; the model "leank" is registered and chosen. --model_args
are settings of conf/eval/eval.yaml (model, model.name, cache.sink, prefill_chunk, ...); method is one name.
"""

from typing import TYPE_CHECKING, Any

from leank.extras import require

if TYPE_CHECKING:
    from leank.eval.lm_eval.model import CompressedLM

__all__ = ["CompressedLM"]

require("leank.eval.lm_eval", "lm_eval", "lm_eval", "hydra")


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is asked for: the command's --help needs no torch."""
    if name == "CompressedLM":
        from leank.eval.lm_eval.model import CompressedLM

        return CompressedLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
