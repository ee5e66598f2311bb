"""Eq. 1 in training, for every family that can be trained: the student against the whole model in one pass.

The oracle shares no code with leank_train: transformers runs the model, and an attention function of its own scales
the keys of the middle for answer rows.
"""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from leank_train.forward.branching import branch, prefill, student
from tests.helpers.families import build, trained

CONTEXT, ANSWER, DOCUMENT = 36, 9, 30  # shorter than the sliding windows
SINK, WINDOW = 3, 8
scales = {}  # the scores [L, H, D] that the oracle applies, None = full attention


def eq1(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Softmax over q (alpha k) for rows of the answer and columns of the middle, over q k elsewhere."""
    group, length = query.shape[1] // key.shape[1], key.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    logits = query @ key.mT
    if scales["alpha"] is not None:
        alpha = scales["alpha"][module.layer_idx].repeat_interleave(group, 0)[:, None]
        middle = (i >= CONTEXT) & (j >= SINK) & (i - j >= WINDOW)
        logits = torch.where(middle, query @ (key * alpha).mT, logits)
    weight = (logits * scaling).masked_fill(j > i, -torch.inf).softmax(-1)
    return (weight @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("eq1", eq1)
AttentionMaskInterface.register("eq1", lambda *args, **kwargs: None)


def whole(model, ids, alpha):
    """Hidden states of the answer from one pass over context and answer."""
    scales["alpha"] = alpha
    before = model.config._attn_implementation
    model.set_attn_implementation("eq1")
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, CONTEXT:]
    model.set_attn_implementation(before)
    return hidden


@pytest.mark.parametrize("name", trained())
def test_the_student_is_eq1(name):
    model = build(name)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 61, (1, CONTEXT + ANSWER), generator=generator)
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    alpha = torch.rand(2, 2, dim, generator=generator, dtype=torch.float64)
    prefix = prefill(model, ids[:, :DOCUMENT], [DOCUMENT])
    teacher = branch(model, prefix, ids[:, DOCUMENT:], [CONTEXT + ANSWER - DOCUMENT])
    question = teacher.cut([CONTEXT - DOCUMENT])
    settings = {"sink": SINK, "window": WINDOW, "empty_heads": "zero"}
    got = student(model, prefix, question, ids[:, CONTEXT:], [ANSWER], alpha, **settings)
    want, full = whole(model, ids, alpha), whole(model, ids, None)
    close = {"rtol": 1e-5, "atol": 1e-5}  # norms of many models round to float32
    torch.testing.assert_close(teacher.hidden[:, CONTEXT - DOCUMENT :], full, **close)
    torch.testing.assert_close(got, want, **close)
    assert (want - full).abs().max() > 1e-3  # the scores matter
