"""The slow, obvious form of Eq. 1: one sequence of context and answer in one pass, with dense [S, S] matrices.

It knows no blocks, no branches and no kept K/V, and shares no code with leank_train: transformers runs the model, with
an attention function of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tests.oracles.eq1 import eq1

NAME = "plain_form"


class Form(NamedTuple):
    """Rows before `context` attend in full, those from it on by Eq. 1.

    alpha: [L, H, D]; None for full attention in all rows (the teacher).
    sink, window: tokens; the window counts the row itself, unless there is a flush.
    flush: None in training. In a cache the window is the last `window` tokens of the context; it takes in every row,
        and gives its oldest `flush` tokens to the middle whenever it holds `window + flush`.
    empty_heads: as in `fused.fused_attention`.
    mean: [L, H, D], the middle's keys are alpha * k + (1 - alpha) * mean; 0 by default.
    """

    context: int
    alpha: Tensor | None = None
    sink: int = 0
    window: int = 1
    empty_heads: str = "zero"
    mean: Tensor | None = None
    flush: int | None = None

    def middle(self, length: int) -> Tensor:
        """Which tokens each row reads through the middle, bool [length, length]."""
        row, column = torch.arange(length)[:, None], torch.arange(length)
        if self.flush is None:
            end = row - self.window + 1
        else:
            first = max(self.sink, self.context - self.window)
            end = first + (row - first - self.window).clamp(min=0) // self.flush * self.flush
        return (row >= self.context) & (column >= self.sink) & (column < end)


_now: list[Form] = []


@contextmanager
def plain(model: PreTrainedModel, form: Form) -> Iterator[None]:
    """Let the model attend by `form`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _now.append(form)
    try:
        yield
    finally:
        _now.pop()
        model.set_attn_implementation(before)


def plain_forward(
    model: PreTrainedModel, ids: Tensor, context: int, alpha: Tensor | None = None, **more: object
) -> Tensor:
    """Hidden states [S, hidden] after the final norm, of ids [S]; see `Form`."""
    with plain(model, Form(context, alpha, **more)):
        return model.base_model(ids[None], use_cache=False).last_hidden_state[0]


def _attention(module, q, k, v, attention_mask, scaling=None, s_aux=None, softcap=None, **_):
    form = _now[-1]
    alpha, mean = (None if x is None else x[module.layer_idx] for x in (form.alpha, form.mean))
    middle = form.middle(q.shape[2])
    plain, middle = attention_mask & ~middle, attention_mask & middle
    out = eq1(q, k, v, alpha, scaling, plain, middle, form.empty_heads, mean, s_aux, softcap)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args, **kwargs):
    """Bool [B, 1, n, T], whether the layer has a sliding window or not."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
