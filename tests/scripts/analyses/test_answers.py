"""What masks do to the right answer, against a plain forward with zeroed or hidden keys; and the two analyses on it."""

import pytest
import torch

from leank.channel_scores import lowest_frequencies
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from scripts.analyses.leank import group_removal, known, streaming, w_hf
from tests.helpers.analysis_source import DIM, GROUP, HEADS, LAYERS, LENGTH, only, source, tiny_model

TASK = "niah_multikey_1"


def forward(ids, first, keep, sink, window, empty_heads):
    """Logits of a Llama written out, whose rows from `first` on read keys outside sink and window through `keep`."""
    model = tiny_model()
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, place = model.model.embed_tokens(ids), torch.arange(ids.shape[1])
    cos, sin = model.model.rotary_emb(hidden, place[None])
    middle = (place >= sink) & (place <= place[:, None] - window) & (place[:, None] >= first)  # [T, T]
    for layer, mask in zip(model.model.layers, keep, strict=True):
        x, own = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (part(x).view(1, -1, n, DIM).transpose(1, 2) for part, n in (
            (own.q_proj, HEADS * GROUP), (own.k_proj, HEADS), (own.v_proj, HEADS)))  # fmt: skip
        q, k = (y[0] for y in apply_rotary_pos_emb(q, k, cos, sin))
        k, v, mask = (y.repeat_interleave(GROUP, 0) for y in (k, v[0], mask))
        logits = torch.where(middle, q @ (k * mask[:, None]).mT, q @ k.mT) / DIM**0.5
        if empty_heads == "drop":
            logits = logits.masked_fill(middle & ~mask.any(-1)[:, None, None], -torch.inf)
        logits = logits.masked_fill(place > place[:, None], -torch.inf)
        out = (logits.softmax(-1) @ v).transpose(0, 1).reshape(1, len(place), -1)
        hidden = hidden + own.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0]


def expected(found, sample, keep, *sizes):
    ids = found.ids(sample)
    answer = torch.tensor([found.tokenizer(sample.target, add_special_tokens=False)["input_ids"]])
    logits = forward(torch.cat([ids, answer[:, :-1]], 1), ids.shape[1], keep, *sizes)[ids.shape[1] :]
    right = answer[0, 1:]
    return (
        torch.nn.functional.cross_entropy(logits, right).item(),
        (logits.argmax(-1) != right).double().mean().item(),
    )


@pytest.mark.parametrize(("sink", "window", "empty_heads"), [(0, 1, "zero"), (4, 24, "drop")])
def test_answers_under_masks(sink, window, empty_heads):
    found = source()
    sample = found.sample(TASK, LENGTH, 0)
    keep = torch.rand(3, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[0], keep[1, 1, 0] = True, False
    result = known(found, sample, keep, sink, window, empty_heads)
    for mask, loss, wrong in zip(keep, *result, strict=True):
        assert (loss.item(), wrong.item()) == pytest.approx(
            expected(found, sample, mask, sink, window, empty_heads), abs=1e-5
        )


@pytest.mark.parametrize(("per", "groups"), [("model", 2), ("layer", 2 * LAYERS), ("head", 2 * LAYERS * HEADS)])
def test_every_group_is_removed_alone(per, groups):
    found = source()
    rows = group_removal(found, TASK, LENGTH, samples=1, per=per)
    sample, full = found.sample(TASK, LENGTH, 0), torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool)
    loss = only(rows, measure="loss")
    assert len(loss) == groups
    for one in loss[:3]:
        keep = full.clone()
        layer, head = (slice(None) if one[name] is None else one[name] for name in ("layer", "head"))
        keep[layer, head, one["channel"] : one["channel"] + 4] = False
        before, after = (expected(found, sample, mask, 0, 1, "zero")[0] for mask in (full, keep))
        assert one["value"] == pytest.approx(after - before, abs=1e-5)


def test_a_group_must_divide_the_head():
    with pytest.raises(ValueError, match="channels=3 does not divide head_dim=8"):
        group_removal(source(), channels=3)


def test_heads_stream_by_their_high_frequencies():
    found = source()
    rows = w_hf(found, TASK, (TASK,), LENGTH, samples=2, shares=(0.5,), trials=2, sink=4, window=24)
    prompt = found.observe(found.ids(found.sample(TASK, LENGTH, 0)), 32)
    ratio = high_frequency_ratio(prompt, ~lowest_frequencies(found.config, 0.5).keep, 32)
    assert [one["value"] for one in only(rows, measure="w_hf")] == ratio.flatten().tolist()
    chosen = {(order, trial): heads for order, _, trial, heads in streaming(ratio, (0.5,), 2)}
    assert not chosen["dense", 0].any()
    assert all(int(heads.sum()) == LAYERS * HEADS // 2 for (order, _), heads in chosen.items() if order != "dense")
    assert ratio[chosen["highest", 0]].min() > ratio[~chosen["highest", 0]].max()
    assert torch.equal(chosen["lowest", 0], ~chosen["highest", 0])
    assert not torch.equal(chosen["random", 0], chosen["random", 1])
    assert len(only(rows, measure="exact")) == 5
