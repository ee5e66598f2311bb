"""The page layout, in which every column of a token lies in one place, and attention over such pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.serving import attention
from leank.eval.serving.layout import LINE, STRIPE, PageLayout
from leank.mask import ChannelMask
from tests import ROOT
from tests.helpers.largest import Largest
from tests.helpers.serving import Server
from tests.oracles import cache_attention as naive
from tests.oracles.attention import attention as attend_plainly
from tests.oracles.attention import causal


def random_layout(seed, block=16, dim=32, layers=2, heads=3, hits=True):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(layers, heads, dim, generator=generator) < torch.rand(layers, heads, 1, generator=generator)
    keep[torch.rand(layers, heads, generator=generator) < 0.3] = False
    keep[0, 0], keep[0, 1] = True, False  # a whole head and an empty one
    return keep, PageLayout.of(keep, block, sink=4, window=24, hits=hits)


def stripes(group):
    """(first element, elements) of every stripe in a page."""
    for layer in group.layers:
        for head in layer:
            yield from (
                (group.block * stripe.start, group.block * stripe.width) for stripe in (head.k, head.v) if stripe.width
            )


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), block=st.sampled_from([16, 32, 48, 64, 128]), hits=st.booleans())
def test_every_channel_lies_in_one_group_and_no_runs_overlap(seed, block, hits):
    keep, layout = random_layout(seed, block, hits=hits)
    for group, stored in ((layout.kept, keep), (layout.rest, ~keep)):
        ends = 0
        for first, size in sorted(stripes(group)):
            assert first >= ends
            ends = first + size
        assert ends <= group.block * group.columns <= layout.page_columns
        for layer, of_layer in zip(group.layers, stored, strict=True):
            assert layer[0].k.start % LINE == 0
            for head, channels in zip(layer, of_layer, strict=True):
                assert torch.equal(head.channels, channels.nonzero().flatten())
                assert head.k.width % STRIPE == 0 <= head.k.width - head.k.count < STRIPE
    both = [[h.v.count for layer in group.layers for h in layer] for group in (layout.kept, layout.rest)]
    assert [sorted(pair) for pair in zip(*both, strict=True)] == [[0, keep.shape[-1]]] * keep[..., 0].numel()
    held, room = layout.rest.block * layout.rest.columns, block * layout.kept.columns
    if hits:
        assert block % layout.rest.block == 0
    else:  # another token would not fit
        assert room < held + layout.rest.columns
    assert held <= room or layout.rest.block == 1


def read(group, pages, layer, slots, dim):
    """K, V [n, H, D] of the tokens at `slots`, with zeros for what the group does not hold."""
    heads, at = group.layers[layer], (slots // group.block, slots % group.block)
    k, v = (pages.new_zeros(len(slots), len(heads), dim) for _ in range(2))
    for head, stripes in enumerate(heads):
        k[:, head, stripes.channels] = group.stripe(pages, stripes.k)[at][:, : stripes.k.count]
        if stripes.v.width:
            v[:, head] = group.stripe(pages, stripes.v)[at]
    return k, v


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_both_groups_together_give_back_what_was_written(seed, dtype):
    keep, layout = random_layout(seed)
    heads, dim = keep.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    pages = torch.full((9, layout.page_columns), torch.nan, dtype=dtype)
    k, v = torch.randn(2, 2, 40, heads, dim, generator=generator).to(dtype)  # [2 layers, 40 tokens, H, D]
    slots, blocks = {}, iter((torch.randperm(8, generator=generator) + 1).tolist())
    for name, group in (("kept", layout.kept), ("rest", layout.rest)):
        tokens = 40 if name == "kept" else 2 * group.block
        table = torch.tensor([next(blocks) for _ in range(-(-tokens // group.block))])
        position = torch.arange(tokens)
        slots[name] = table[position // group.block] * group.block + position % group.block
        for layer in range(2):
            group.write(pages, layer, slots[name], k[layer, :tokens], v[layer, :tokens])
    whole = len(slots["rest"])
    for layer in range(2):
        kept_k, kept_v = read(layout.kept, pages, layer, slots["kept"], dim)
        rest_k, rest_v = read(layout.rest, pages, layer, slots["rest"], dim)
        some = keep[layer].any(-1)[:, None]
        assert torch.equal(kept_k, k[layer] * keep[layer])
        assert torch.equal(kept_v, v[layer] * some)
        assert torch.equal(kept_k[:whole] + rest_k, k[layer, :whole])
        assert torch.equal(kept_v[:whole] + rest_v, v[layer, :whole])
    assert pages[0].isnan().all()


def test_nothing_is_written_to_the_null_block():
    keep, layout = random_layout(1)
    pages = torch.zeros(3, layout.page_columns)
    tokens = torch.ones(4, 3, keep.shape[-1])
    for group in (layout.kept, layout.rest):
        group.write(pages, 0, torch.tensor([-1, 0, group.block - 1, group.block]), tokens, tokens)
    assert not pages[0].any()
    assert pages[1].any()


@pytest.mark.parametrize(
    ("keep", "block", "words"),
    [
        (torch.ones(1, 2, 16), 16, "prunes nothing"),
        (torch.zeros(1, 2, 16), 16, "every channel"),
        (torch.eye(16)[None], 24, "block_size=24"),
        (torch.eye(16)[None], 16 * 10**11, "block_size=1600000000000 must be a multiple of 16 up to 65536"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(keep, block, words):
    with pytest.raises(ValueError, match=words):
        PageLayout.of(keep.bool(), block, 4, 4)


def test_pages_of_the_reference_mask_waste_little():
    mask = ChannelMask.load(ROOT / "models/reference/mask_70pct.safetensors")
    layout = PageLayout.of(mask.keep, 32, 16, 144)
    assert layout.kept.columns == 1408  # 1,376 channels and values; two layers are rounded up to 32 columns
    assert layout.rest.block == 16
    assert layout.page_columns == 32 * 1408


HEADS, GROUP, DIM, SINK, WINDOW = 3, 2, 32, 4, 24
SCALE = DIM**-0.5


def server_of(seed, block=16, dtype=torch.float64):
    keep = torch.rand(1, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) < 0.4
    keep[0, 1] = False
    return keep, Server(PageLayout.of(keep, block, SINK, WINDOW), seed, dtype)


def tokens(generator, n, dtype=torch.float64):
    k, v = torch.randn(2, n, HEADS, DIM, generator=generator, dtype=dtype)
    return k, v, torch.randn(n, HEADS * GROUP, DIM, generator=generator, dtype=dtype)


def decoded_by_the_cache(keep, prompt, k, v, q):
    """Outputs of the positions behind the prompt, by a compressed cache that flushes one by one."""
    rows = [x.transpose(0, 1)[None] for x in (k, v, q)]
    store = Store(rows[0][:, :, :prompt], rows[1][:, :, :prompt], None, Middle(keep[0]), Sizes(SINK, WINDOW, 1))
    outs = []
    for at in range(prompt, len(k)):
        position = store.append(*(x[:, :, at : at + 1] for x in rows[:2]))
        outs.append(naive.attend(store, rows[2][:, :, at : at + 1], position, SCALE)[0, 0])
        store.flush()
    return torch.stack(outs)


def plainly(keep, k, v, q, first, chunk):
    """What the layout says a chunk from position `first` reads."""
    end, token = first + chunk, torch.arange(first + chunk)
    middle = (token >= SINK) & (token < first - WINDOW)
    keys = torch.where(middle[:, None, None], k[:end] * keep[0], k[:end])
    gone = middle & ~keep[0].any(-1, keepdim=True)  # [H, T]
    seen = causal(chunk, end) & ~gone.repeat_interleave(GROUP, 0)[:, None]
    q, keys, v = (x.transpose(0, 1)[None] for x in (q[first:end], keys, v[:end]))
    return attend_plainly(q, keys, v, SCALE, seen)[0].transpose(0, 1)


@pytest.mark.parametrize(("block", "seed"), [(16, 0), (32, 1), (48, 2), (128, 3)])
def test_requests_that_decode_together_read_what_a_compressed_cache_reads(block, seed):
    keep, server = server_of(seed, block)
    lengths = {"short": 2, "in the window": 20, "long": 90, "longer": 131}
    held = {name: tokens(server.generator, prompt + 30) for name, prompt in lengths.items()}
    wanted = {n: decoded_by_the_cache(keep, p, *held[n]) for n, p in lengths.items()}
    server.step([(n, p, *(x[:p] for x in held[n]), p) for n, p in lengths.items()], SCALE)
    for new in range(30):
        ends = {n: p + new + 1 for n, p in lengths.items()}
        requests = [(n, lengths[n], *(x[end - 1 : end] for x in held[n]), end) for n, end in ends.items()]
        for name, out in zip(lengths, server.step(requests, SCALE), strict=True):
            torch.testing.assert_close(out[0], wanted[name][new])


@pytest.mark.parametrize("chunk", [7, 16, 40, 200])
def test_chunks_read_a_pruned_middle_and_all_of_themselves(chunk):
    keep, server = server_of(4)
    k, v, q = tokens(server.generator, 150)
    for first in range(0, 150, chunk):
        end = min(150, first + chunk)
        (out,) = server.step([("a", 150, k[first:end], v[first:end], q[first:end], end)], SCALE)
        torch.testing.assert_close(out, plainly(keep, k, v, q, first, end - first))


@pytest.mark.parametrize("logits", [attention.LOGITS, 3000, 1])
def test_positions_that_a_preempted_request_generated_read_what_they_read_before(logits, monkeypatch):
    monkeypatch.setattr(attention, "LOGITS", logits)
    keep, server = server_of(5)
    k, v, q = tokens(server.generator, 140)
    wanted = decoded_by_the_cache(keep, 60, k, v, q)
    (out,) = server.step([("again", 60, k, v, q, 140)], SCALE)
    torch.testing.assert_close(out[:60], plainly(keep, k, v, q, 0, 60))
    torch.testing.assert_close(out[60:], wanted)
    (first,) = server.step([("in chunks", 60, k[:100], v[:100], q[:100], 100)], SCALE)
    (second,) = server.step([("in chunks", 60, k[100:], v[100:], q[100:], 140)], SCALE)
    torch.testing.assert_close(torch.cat([first, second])[60:], wanted)


def test_a_long_reply_that_is_computed_again_takes_no_more_memory_than_its_k_and_v(monkeypatch):
    monkeypatch.setattr(attention, "LOGITS", 2**14)
    _, server = server_of(7)
    k, v, q = tokens(server.generator, 1200)
    server.step([("again", 100, k[:100], v[:100], q[:100], 100)], SCALE)
    with Largest() as largest:
        server.step([("again", 100, k[100:], v[100:], q[100:], 1200)], SCALE)
    assert largest.numbers <= q.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_close(dtype):
    keep, server = server_of(6, dtype=dtype)
    k, v, q = tokens(server.generator, 100, dtype)
    (out,) = server.step([("a", 99, k[:99], v[:99], q[:99], 99)], SCALE)
    (last,) = server.step([("a", 99, k[99:], v[99:], q[99:], 100)], SCALE)
    wide = [x.double() for x in (k, v, q)]
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(out.double(), plainly(keep, *wide, 0, 99), **close)
    torch.testing.assert_close(last.double(), plainly(keep, *wide, 99, 1), **close)
