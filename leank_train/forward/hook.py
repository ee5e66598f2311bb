"""Run a frozen transformers decoder with another attention, through public interfaces: no class is patched.

`run_decoder(model, ids, positions, state)` calls `state.attend(layer, q, k, v, scale, softmax)` in every layer. The
attention function is registered for the whole process; the model's own choice is restored after each pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from leank.eval.cache.attention.softmax import Softmax

NAME = "leank_branching"


class State(Protocol):
    """What one pass over the decoder does in its attention layers."""

    longest: int  # tokens of the longest sequence that the pass reaches, documents included

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Attention [R, Hq, n, D] of a layer (from 0) over q [R, Hq, n, D] and k, v [R, H, n, D]; q, k: after RoPE.

        softmax: how the layer's logits become weights, with sinks or soft-capped logits if it has them.
        """


def run_decoder(model: PreTrainedModel, ids: Tensor, positions: Tensor, state: State) -> Tensor:
    """Run one pass over the decoder: hidden states [R, n, hidden] after the final norm; ids, positions: [R, n].

    Raises ValueError if the sequences are longer than the model's positions or its sliding window, or if its attention
    has an argument that is not implemented (`Softmax.of`).
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and state.longest > limit:
        raise ValueError(
            f"a sequence of {state.longest} tokens is longer than the model's max_position_embeddings={limit}; "
            "lower the context length or extend the model's RoPE"
        )
    with _attention(model):
        return model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, leank_state=state
        ).last_hidden_state


@contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    # Setting the config is enough. model.set_attn_implementation walks every module, which takes milliseconds per pass.
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float,
    leank_state: State | None = None, sliding_window: int | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    kind = module.config.model_type  # type: ignore[union-attr]
    if leank_state is None:
        raise ValueError(f"model={kind} does not hand keyword arguments down to its attention; choose another model")
    if sliding_window is not None and leank_state.longest > sliding_window:
        raise ValueError(
            f"layer {module.layer_idx} of the model has sliding_window={sliding_window}, but a sequence has "
            f"{leank_state.longest} tokens; such a layer has no middle to prune: use shorter contexts or a model "
            "without sliding_window"
        )
    softmax = Softmax.of(module.layer_idx, kwargs)
    out = leank_state.attend(module.layer_idx, query, key, value, scaling, softmax)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None  # [R, n, Hq, D]


# Positions decide what a row sees, so no mask function is registered under this name. The library then makes no mask,
# and does not look for packed sequences, which would wait for the GPU in every pass.
AttentionInterface.register(NAME, _attend)
