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
from transformers.masking_utils import AttentionMaskInterface

from tests.oracles.eq1 import eq1

NAME = "plain_form"


class Form(NamedTuple):
    """Rows before `context` attend in full, those from it on by Eq. 1.

    alpha: [L, H, D]; None for full attention in all rows (the teacher).
    sink, window: tokens; the window counts the row itself.
    empty_heads: as in `fused.fused_attention`.
    mean: [L, H, D], the middle's keys are alpha * k + (1 - alpha) * mean; 0 by default.
    """

    context: int
    alpha: Tensor | None = None
    sink: int = 0
    window: int = 1
    empty_heads: str = "zero"
    mean: Tensor | None = None


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
    form, row, column = _now[-1], torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    middle = (row >= form.context) & (column >= form.sink) & (column <= row - form.window)
    alpha, mean = (None if x is None else x[module.layer_idx] for x in (form.alpha, form.mean))
    seen = (column <= row) & ~middle
    out = eq1(q, k, v, alpha, scaling, seen, middle, form.empty_heads, mean, s_aux, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
