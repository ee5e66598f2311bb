"""TriAttention: what calibration finds, and which tokens of a prompt stay. Replies: test_long_replies.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.methods.tokens.adakv import AdaKV
from leank.eval.methods.tokens.expected_attention import frequencies
from leank.eval.methods.tokens.triattention import TriAttention
from tests.conftest import tiny_model
from tests.helpers.cache_oracle import left_padded
from tests.oracles import triattention as oracle

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LENGTHS = (17, 23, 30)


def passes(chunk=None, **given):
    """(a choice calibrated on random prompts in place of its samples, the model, queries before RoPE [L][Hq, n, D])."""
    model, (_, tokenizer) = tiny_model("llama", **given), load_config(ModelConfig())
    ids = [left_padded((length,), length)[0] % model.config.vocab_size for length in LENGTHS]
    coming, found = iter(ids), [[] for _ in model.model.layers]
    choice = TriAttention(12, length=700, samples=len(ids), future=40)
    hooks = [layer.self_attn.q_proj.register_forward_hook(lambda _, __, out, to=to: to.append(out[0]))
             for layer, to in zip(model.model.layers, found, strict=True)]  # fmt: skip
    choice.calibrate(
        lambda sample, queries: prefill(model, next(coming), None, 0, queries, chunk), tokenizer, model.config
    )
    for hook in hooks:
        hook.remove()
    heads = model.config.num_attention_heads
    return choice, model, [torch.cat(one).unflatten(1, (heads, -1)).transpose(0, 1) for one in found]


@pytest.mark.parametrize("chunk", [None, 7])
def test_calibration_finds_the_means_of_all_queries_before_rope(chunk):
    choice, model, queries = passes(chunk)
    for index, of_layer in enumerate(queries):
        assert of_layer.shape[1] == sum(LENGTHS)
        pairs = torch.complex(*of_layer.chunk(2, -1))
        found = choice.centres(index, model.config)
        torch.testing.assert_close(found.mean.flatten(0, 1), pairs.mean(1))
        torch.testing.assert_close(found.size.flatten(0, 1), pairs.abs().mean(1))
        assert found.mean.shape == (2, 2, 4)
        assert (found.size >= found.mean.abs()).all()


@pytest.mark.parametrize("rope", [None, YARN], ids=["default", "yarn"])
@settings(deadline=None, max_examples=6)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3), budget=st.integers(8, 24),
       sink=st.integers(0, 4), window=st.integers(0, 4))  # fmt: skip
def test_a_prompt_keeps_what_the_slow_form_of_each_row_alone_keeps(rope, lengths, budget, sink, window):
    choice, model, _ = passes(**({"rope_parameters": rope} if rope else {}))
    choice = TriAttention(budget, length=700, samples=len(LENGTHS), future=40, _found=choice._found)
    ids, mask = left_padded(lengths, 5)
    found = prefill(model, ids % model.config.vocab_size, mask.bool(), 0)
    keeps = choice.keep_mask(found, model.config, Sizes(sink, window, 4))
    for index, (layer, keep) in enumerate(zip(found.layers, keeps, strict=True)):
        centres, length = choice.centres(index, model.config), max(lengths)
        for row, own in enumerate(lengths):
            middle = range(min(sink, own), max(min(sink, own), own - window))
            for head in range(2):
                keys = layer.keys[row, head, length - own :]
                scores = oracle.scores(keys, range(own), own, centres.mean[head], centres.size[head],
                                       frequencies(model.config), 40).tolist()  # fmt: skip
                best = sorted(middle, key=lambda j, of=scores: (-of[j], j))[: budget - sink - window]
                want = sorted({*range(own)} - {*middle} | {*best})
                kept = keep[row, head, length - own :].nonzero()[:, 0].tolist() if keep is not None else [*range(own)]
                assert kept == want


def test_a_score_does_not_depend_on_where_a_sequence_begins():
    """Keys and the next token moved by as many places have the same distances; one further on has others."""
    choice, model, _ = passes()
    centres, frequency = choice.centres(0, model.config), frequencies(model.config)
    keys = torch.randn(1, 2, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = torch.ones(1, 1, 9, dtype=torch.bool)
    turned = torch.complex(*keys.chunk(2, -1)) * torch.polar(torch.ones(4, dtype=torch.float64), 7 * frequency)
    moved = torch.cat([turned.real, turned.imag], -1)
    want = centres.scores(keys, there, torch.tensor([20]))
    torch.testing.assert_close(centres.scores(moved, there, torch.tensor([27])), want)
    assert not torch.allclose(centres.scores(moved, there, torch.tensor([20])), want)


def test_what_it_cannot_score_is_refused():
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="must be calibrated before it is used"):
        TriAttention(12).eviction(0, model.config, Sizes(2, 4, 4))
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(ValueError, match=r"triattention needs a model whose RoPE rotates all channels.*\(dynamic\)"):
        TriAttention(12).check(model.config, None)
    with pytest.raises(ValueError, match=r"adakv\.scores_of\.name=triattention has no scores; choose snapkv"):
        _ = AdaKV(12, {"name": "triattention"}).inner
