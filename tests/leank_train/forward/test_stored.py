"""The student of a layout of bits: against dense matrices, number by number, and against a cache that stores it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.storage.quantised import Packing
from leank.mask import ChannelMask
from leank.precision import GROUP, VALUE_BITS, Precision
from leank_train.forward.branching import Branch, Prefix, branch, prefill
from leank_train.forward.stored import StoredPass, rounded, stored, stored_student, widths_of
from tests.conftest import tiny_model
from tests.helpers.branches import tokens
from tests.oracles.bits import fake_quantise

WIDTHS = [0.0, 0.7, 2.0, 2.5, 3.0, 3.4, 4.0, 6.5, 8.0, 12.0, 16.0]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_that_of_a_cache(bits, dtype, packed):
    x, codec = normal(2, 3, 128, 16, dtype=dtype), Packing(bits, GROUP, packed=packed)
    found = rounded(x, torch.full((3, 1, 1), float(bits)), GROUP, packed)
    assert torch.equal(found, codec.restore(*codec.quantise(x)).to(dtype))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 150), bits=st.lists(st.sampled_from([2, 3, 4]), min_size=3))
def test_every_channel_has_its_own_levels(seed, length, bits):
    x = normal(length, len(bits), seed=seed)
    x[:, 0] = 1.5  # equal numbers come back exactly
    found = rounded(x, torch.tensor(bits, dtype=torch.float32)[None], GROUP)
    for channel, width in enumerate(bits):
        for cell, mine in zip(x[:, channel].split(GROUP), found[:, channel].split(GROUP), strict=True):
            torch.testing.assert_close(mine, fake_quantise(cell, width), rtol=0, atol=1e-12)


def slow(q, k, v, widths, scale, plain, middle, first, softcap, sinks):
    """Attention [Hq, n, D] of one branch in dense matrices; plain, middle: bool [n, T]; cells begin at `first` [T]."""
    group, out = len(q) // len(k), []

    def cap(logits):
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    for h, query in enumerate(q):
        of_keys, (of_value, gate) = widths[h // group, :-2], widths[h // group, -2:]
        keys, values = k[h // group].clone(), v[h // group].clone()
        for start, stop in first:
            cells = keys[start:stop]
            keys[start:stop] = torch.stack([one(x, w) for x, w in zip(cells.mT, of_keys, strict=True)], 1)
        values = torch.stack([one(x, of_value, fade=False) for x in values])
        weights = cap(query @ k[h // group].mT * scale).exp() * plain
        stored_weights = cap(query @ keys.mT * scale).exp() * middle * (gate + 1e-3 * (1 - gate))
        total = (weights + stored_weights).sum(-1, keepdim=True) + (0 if sinks is None else sinks[h].exp())
        out.append((weights @ v[h // group] + stored_weights @ values) / total)
    return torch.stack(out)


def one(x, width, fade=True):
    """A channel [T] of K in cells along tokens, or a token [D] of V in one cell, at a real width."""
    below = max(b for b in VALUE_BITS if b <= max(2, width))
    error = torch.cat([fake_quantise(cell, below) - cell for cell in x.split(GROUP)]) if below < 16 else 0 * x
    found = x + error * (2**below - 1) / (2 ** width.clamp(min=2) - 1)
    return found * (width / 2).clamp(max=1) if fade else found


def the_pass(widths, sink=3, window=6, empty="zero"):
    """A pass over one document of 90 tokens with two questions, of 9 and 4, and answers of 3 and 2; and its tensors."""
    generator = torch.Generator().manual_seed(5)
    H, D, n = 2, widths.shape[-1] - 2, 3
    keys, values = (normal(1, H, 90, D, seed=s) for s in (1, 2))
    prefix = Prefix([keys], [values], torch.arange(90)[None], torch.tensor([90]))
    lengths, asked = torch.tensor([9, 4]), torch.arange(9)
    own = (90 + asked).expand(2, -1).masked_fill(asked >= lengths[:, None], -1)
    question = Branch(
        [normal(2, H, 9, D, seed=3)], [normal(2, H, 9, D, seed=4)], own, lengths, torch.tensor([90, 90]), torch.empty(0)
    )
    positions = 90 + lengths[:, None] + torch.arange(n)
    seen = positions.masked_fill(torch.arange(n) >= torch.tensor([3, 2])[:, None], -1)
    state = StoredPass(prefix, question, positions, seen, widths, sink, window, empty)
    q, k, v = (torch.randn(2, h, n, D, generator=generator, dtype=torch.float64) for h in (2 * H, H, H))
    return state, (q, k, v), (prefix, question, positions)


def random_widths(seed, heads=2, dim=8):
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(len(WIDTHS), (1, heads, dim + 1), generator=generator)
    shares = torch.rand(1, heads, 1, generator=generator, dtype=torch.float64)
    return torch.cat([torch.tensor(WIDTHS, dtype=torch.float64)[at], shares], -1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("softmax", [PLAIN, Softmax(None, normal(4, seed=6)), Softmax(2.0)])
def test_attention_equals_the_dense_form(seed, softmax):
    widths = random_widths(seed)
    if softmax.softcap is not None:
        widths[..., -1] = 1  # a share in between has another meaning there
    state, (q, k, v), (prefix, question, positions) = the_pass(widths)
    found, scale = state.attend(0, q, k, v, 0.3, softmax), 0.3
    for r, (asked, answered) in enumerate([(9, 3), (4, 2)]):
        keys = torch.cat([prefix.keys[0][0], question.keys[0][r, :, :asked], k[r, :, :answered]], 1)
        values = torch.cat([prefix.values[0][0], question.values[0][r, :, :asked], v[r, :, :answered]], 1)
        i, j = positions[r, :answered, None], torch.arange(keys.shape[1])
        plain = (j <= i) & ((j < 3) | (i - j < 6))
        spans = [(3, 90), (90, 90 + asked), (90 + asked, 90 + asked + answered)]
        seen = plain.double(), ((j <= i) & ~plain).double()
        wanted = slow(q[r, :, :answered], keys, values, widths[0], scale, *seen, spans, *softmax)
        torch.testing.assert_close(found[r, :, :answered], wanted, rtol=1e-9, atol=1e-9)


def test_every_width_has_its_gradient():
    widths = random_widths(7)
    widths[..., :-1] = (widths[..., :-1] + 0.05).clamp(max=15)  # off the grid, where the level changes
    widths.requires_grad_()

    def attend(widths):
        state, given, _ = the_pass(widths)
        return state.attend(0, *given, 0.3, PLAIN)[0]

    assert torch.autograd.gradcheck(attend, widths, eps=1e-6, atol=1e-6)


def test_the_error_shrinks_without_a_jump_but_for_its_pattern():
    x = normal(1, 2000, 1)
    size = [float((stored(x, torch.full((1, 1, 1), w), GROUP) - x).square().mean()) for w in (2.999, 3, 3.999, 4)]
    assert size[0] == pytest.approx(size[1], rel=0.1)
    assert size[2] == pytest.approx(size[3], rel=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layout_is_read_as_a_cache_stores_it(packed):
    """What is measured is what is deployed: the next token's logits through a cache of the layout."""
    model, (sink, window, group) = tiny_model("llama"), (2, 20, 2 * GROUP)
    (document,), (question,), (answer,) = tokens([sink + group + window - 5], 1), tokens([5], 2), tokens([1], 3)
    key_bits = torch.tensor([[[0, 2, 3, 4, 8, 16, 2, 0], [0] * 8], [[16] * 8, [2, 2, 3, 3, 4, 4, 8, 8]]])
    precision = Precision(key_bits.to(torch.uint8), torch.tensor([[2, 8], [3, 16]], dtype=torch.uint8), packed=packed)
    means = normal(2, 2, 8, seed=9, dtype=torch.float32) / 4
    mask = ChannelMask(precision.keep, mean_keys=means, precision=precision)

    cache = compressed_cache(model, mask, sink=sink, window=window, flush=GROUP)
    model(torch.cat([document, question])[None], past_key_values=cache)
    wanted = model(answer[None], past_key_values=cache).logits[0, -1]

    prefix = prefill(model, document[None], [len(document)])
    asked = branch(model, prefix, question[None], [5])
    hidden = stored_student(  # a window counts the token that reads it, a cache's does not
        model, prefix.center_(means), asked, answer[None], [1], widths_of(precision).double(),
        sink=sink, window=window + 1, empty_heads="drop", packed=packed,
    )  # fmt: skip
    torch.testing.assert_close(model.lm_head(hidden[0, 0]), wanted, rtol=1e-9, atol=1e-9)
    whole = model(torch.cat([document, question, answer])[None]).logits[0, -1]
    assert (whole - wanted).abs().max() > 0.05  # the layout changes the reply


def test_shares_of_soft_capped_heads_are_not_learned():
    state, given, _ = the_pass(random_widths(0).requires_grad_())
    with pytest.raises(ValueError, match=r"^this model's softmax has soft-capped logits"):
        state.attend(0, *given, 0.3, Softmax(softcap=2.0))
