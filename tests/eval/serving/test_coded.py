"""Pages of codes: a layout of bits in a served cache, and attention over it, against the naive form and the cache's own
pages."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.banded import codecs
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.segment import Extent
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.serving import attention
from leank.eval.serving.coded import CodedLayout, page_layout
from leank.mask import ChannelMask
from leank.precision import KEY_BITS, VALUE_BITS, Precision
from tests.helpers.layouts import layout
from tests.helpers.serving import Server
from tests.helpers.thinned import thinned
from tests.oracles import cache_attention as naive
from tests.oracles.attention import attention as attend_plainly
from tests.oracles.attention import causal
from tests.oracles.bits import in_bits

HEADS, GROUP, DIM, SINK, WINDOW = 3, 2, 32, 64, 128
SCALE = DIM**-0.5


def a_precision(seed, layers=1, packed=False):
    """Random bits of at most half of a number's bytes; head 0 is empty."""
    return layout((layers, HEADS, DIM), seed, keys=KEY_BITS[:-1], values=VALUE_BITS[:-1], packed=packed)


def tokens(generator, n, dtype=torch.float64):
    k, v = torch.randn(2, n, HEADS, DIM, generator=generator, dtype=dtype)
    return k, v, torch.randn(n, HEADS * GROUP, DIM, generator=generator, dtype=dtype)


def rounded(precision, k, v):
    """K and V [n, H, D] in the bits of layer 0, the tokens of each 64 together; n is a multiple of 64."""
    pairs = []
    for of_k, of_v in zip(k.split(64), v.split(64), strict=True):
        heads = [
            in_bits(of_k[:, h], of_v[:, h], precision.key_bits[0, h], int(precision.value_bits[0, h]), precision.packed)
            for h in range(HEADS)
        ]
        pairs.append([torch.stack(x, 1) for x in zip(*heads, strict=True)])
    found = [torch.cat(x) for x in zip(*pairs, strict=True)]
    return found[0] * precision.keep[0], found[1] * precision.keep[0].any(-1)[:, None]


@settings(max_examples=10, derandomize=True)
@given(
    seed=st.integers(0, 9999), each=st.sampled_from([1, 2, 5]), dtype=st.sampled_from([torch.float64, torch.float32]),
    packed=st.booleans(),
)  # fmt: skip
def test_what_is_packed_comes_back_rounded_and_nothing_else_is_touched(seed, each, dtype, packed):
    precision, generator = a_precision(seed, 2, packed), torch.Generator().manual_seed(seed)
    of = CodedLayout.of(precision, 64 * each, SINK, WINDOW, dtype)
    pages = torch.full((4, of.page_columns), torch.nan, dtype=dtype)
    k, v = torch.randn(2, 3, 64, HEADS, DIM, generator=generator, dtype=dtype)
    numbers = torch.randperm(3 * each, generator=generator)[:3] + each  # none of block 0
    of.pack(pages, 0, numbers, k, v)
    got = of.unpack(pages, 0, numbers)
    torch.testing.assert_close(
        [x.flatten(0, 1) for x in got], list(rounded(precision, k.flatten(0, 1), v.flatten(0, 1))), rtol=0, atol=1e-6
    )
    untouched = torch.full_like(pages, torch.nan)
    of_layer = sum(head.k_bytes + head.v_bytes for head in of.kept.layers[0])
    whole, was = pages.view(torch.uint8), untouched.view(torch.uint8)
    for number in numbers.tolist():
        at = number % each * of.kept.bytes
        was[number // each, at : at + of_layer] = whole[number // each, at : at + of_layer]
    assert torch.equal(whole, was)


@pytest.mark.parametrize("packed", [False, True])
def test_pages_are_those_of_a_compressed_cache(packed):
    precision, generator = a_precision(3, packed=packed), torch.Generator().manual_seed(3)
    of, (codec,) = CodedLayout.of(precision, 64, SINK, WINDOW, torch.float32), codecs(precision)
    k, v = torch.randn(2, 2, 64, HEADS, DIM, generator=generator)
    pages = torch.zeros(3, of.page_columns)
    of.pack(pages, 0, torch.tensor([1, 2]), k, v)
    rows = [x.flatten(0, 1).transpose(0, 1)[None] for x in (k, v)]
    channels = KeptChannels.of(precision.keep[0], rows[0], codec.order)
    capacity = torch.where(precision.keep[0].any(-1), 128, 0)[None].numpy()
    segment = codec.segment(Extent(channels, capacity, DIM, torch.float32))
    segment.append(torch.zeros(1, dtype=torch.int64).numpy(), *rows)
    for number, head in enumerate(of.kept.layers[0]):
        for flat, start, size, at in (
            (segment.k, segment.k_start, head.k_bytes, head.start),
            (segment.v, segment.v_start, head.v_bytes, head.start + head.k_bytes),
        ):
            want = flat[int(start[0, number]) :][: 2 * size].view(2, size)
            assert torch.equal(pages.view(torch.uint8)[1:, at : at + size], want)


@pytest.mark.parametrize(
    ("block", "sink", "window", "words"),
    [
        (32, 64, 256, "block_size=32 must be a multiple of 64 up to 65536"),
        (96, 64, 256, "block_size=96 must be a multiple of 64"),
        (64, 16, 256, "sink=16 must be a multiple of 64, the tokens of a page of codes; take 64"),
        (64, 64, 1000, "window=1000 must be a multiple of 64, the tokens of a page of codes; take 1024"),
    ],
)
def test_what_lies_off_the_grid_is_refused(block, sink, window, words):
    with pytest.raises(ValueError, match=words):
        CodedLayout.of(a_precision(1), block, sink, window, torch.float32)


@pytest.mark.parametrize(("bits", "words"), [(16, "no fewer bytes"), (0, "prunes every channel")])
def test_a_layout_that_saves_nothing_is_refused(bits, words):
    shape = 1, HEADS, DIM
    of_values = torch.full(shape[:2], 16, dtype=torch.uint8)
    precision = Precision(torch.full(shape, bits, dtype=torch.uint8), of_values)
    with pytest.raises(ValueError, match=words):
        page_layout(ChannelMask(precision.keep, precision=precision), 64, 64, 64, torch.float32)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_pages_of_all_heads_follow_each_other_at_multiples_of_a_sector(packed, ranks):
    """Of 32 bytes, which a GPU reads at a time; pages of 64 tokens of all layers, at multiples of 64."""
    bits = a_precision(5, 3, packed)
    precision = Precision(bits.key_bits.repeat(1, 2, 1), bits.value_bits.repeat(1, 2), packed=packed)
    k, v = (x.view(3, ranks, -1).sum(-1) * 64 for x in precision.token_bytes(4))
    for rank in range(ranks):
        of = CodedLayout.of(precision, 128, SINK, WINDOW, torch.float32, True, rank, ranks)
        heads = [head for of_layer in of.kept.layers for head in of_layer]
        starts = [head.start for head in heads] + [int((k + v)[:, rank].sum())]
        assert [head.start + head.k_bytes + head.v_bytes for head in heads] == starts[1:]
        assert not any(start % (32 if packed else 64) for start in starts)
        assert 0 <= of.kept.bytes - starts[-1] < 64
        assert of.kept.bytes % 64 == of.page_bytes % 64 == 0
        assert of.packed == packed


def server_of(seed, block=64, dtype=torch.float64, packed=False):
    precision = a_precision(seed, packed=packed)
    return precision, Server(CodedLayout.of(precision, block, SINK, WINDOW, dtype), seed, dtype, pages=600)


def decoded_by_the_cache(precision, prompt, k, v, q):
    """Outputs of the positions behind the prompt, by a compressed cache on the absolute grid."""
    rows = [x.transpose(0, 1)[None] for x in (k, v, q)]
    middle = Middle(precision.keep[0], bits=codecs(precision)[0])
    sizes = Sizes(SINK, WINDOW, 64, grid="absolute")
    store, outs = Store(rows[0][:, :, :prompt], rows[1][:, :, :prompt], None, middle, sizes), []
    for at in range(prompt, len(k)):
        position = store.append(*(x[:, :, at : at + 1] for x in rows[:2]))
        outs.append(naive.attend(store, rows[2][:, :, at : at + 1], position, SCALE)[0, 0])
        store.flush()
    return torch.stack(outs)


def plainly(precision, k, v, q, first, chunk):
    """What a chunk from position `first` reads."""
    end, begin = first + chunk, max(SINK, (first - WINDOW) // 64 * 64)
    keys, values = k[:end].clone(), v[:end].clone()
    keys[SINK:begin], values[SINK:begin] = rounded(precision, k[SINK:begin], v[SINK:begin]) if begin > SINK else (0, 0)
    token = torch.arange(end)
    gone = ((token >= SINK) & (token < begin)) & ~precision.keep[0].any(-1, keepdim=True)  # [H, T]
    seen = causal(chunk, end) & ~gone.repeat_interleave(GROUP, 0)[:, None]
    rows = (x.double().transpose(0, 1)[None] for x in (q[first:end], keys, values))
    return attend_plainly(*rows, SCALE, seen)[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("block", "seed", "packed"), thinned([(64, 0, False), (128, 1, True), (320, 2, False)], keep=(1, 2))
)
def test_requests_that_decode_together_read_what_a_compressed_cache_reads(block, seed, packed):
    precision, server = server_of(seed, block, packed=packed)
    lengths = {"short": 2, "in the sink": 60, "in the window": 150, "long": 330, "on the grid": 384}
    held = {name: tokens(server.generator, prompt + 70) for name, prompt in lengths.items()}
    wanted = {n: decoded_by_the_cache(precision, p, *held[n]) for n, p in lengths.items()}
    server.step([(n, p, *(x[:p] for x in held[n]), p) for n, p in lengths.items()], SCALE)
    for new in range(70):
        ends = {n: p + new + 1 for n, p in lengths.items()}
        requests = [(n, lengths[n], *(x[end - 1 : end] for x in held[n]), end) for n, end in ends.items()]
        for name, out in zip(lengths, server.step(requests, SCALE), strict=True):
            torch.testing.assert_close(out[0], wanted[name][new])


@pytest.mark.parametrize(("chunk", "packed"), [(30, False), (64, True), (100, False), (100, True), (400, False)])
def test_chunks_read_codes_and_all_of_themselves(chunk, packed):
    precision, server = server_of(4, packed=packed)
    k, v, q = tokens(server.generator, 390)
    for first in range(0, 390, chunk):
        end = min(390, first + chunk)
        (out,) = server.step([("a", 390, k[first:end], v[first:end], q[first:end], end)], SCALE)
        torch.testing.assert_close(out, plainly(precision, k, v, q, first, end - first))


@settings(max_examples=8, derandomize=True)
@given(
    seed=st.integers(0, 9999), ends=st.sets(st.integers(1, 449), max_size=6), block=st.sampled_from([64, 192]),
    packed=st.booleans(),
)  # fmt: skip
def test_codes_do_not_depend_on_the_steps_that_computed_them(seed, ends, block, packed):
    """Prefix hits, and requests that are computed again, find the same bytes."""
    _, server = server_of(seed, block, packed=packed)
    k, v, q = tokens(server.generator, 450)
    for name, steps in (("at once", [0, 450]), ("in steps", [0, *sorted(ends), 450])):
        for first, end in pairwise(steps):
            server.step([(name, 450, k[first:end], v[first:end], q[first:end], end)], SCALE)
    each, page = block // 64, torch.arange(SINK // 64, 7)
    found = []
    for name in ("at once", "in steps"):
        table = torch.tensor(server.tables[name][0])
        found.append(server.layout.unpack(server.pages, 0, table[page // each] * each + page % each))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("logits", "packed"), [(attention.LOGITS, False), (3000, True)])
def test_positions_that_a_preempted_request_generated_read_what_they_read_before(logits, packed, monkeypatch):
    monkeypatch.setattr(attention, "LOGITS", logits)
    precision, server = server_of(5, packed=packed)
    k, v, q = tokens(server.generator, 420)
    wanted = decoded_by_the_cache(precision, 200, k, v, q)
    (out,) = server.step([("again", 200, k, v, q, 420)], SCALE)
    torch.testing.assert_close(out[:200], plainly(precision, k, v, q, 0, 200))
    torch.testing.assert_close(out[200:], wanted)
    (first,) = server.step([("in chunks", 200, k[:350], v[:350], q[:350], 350)], SCALE)
    (second,) = server.step([("in chunks", 200, k[350:], v[350:], q[350:], 420)], SCALE)
    torch.testing.assert_close(torch.cat([first, second])[200:], wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_is_close(packed):
    precision, server = server_of(6, dtype=torch.bfloat16, packed=packed)
    k, v, q = tokens(server.generator, 300, torch.bfloat16)
    (out,) = server.step([("a", 299, k[:299], v[:299], q[:299], 299)], SCALE)
    (last,) = server.step([("a", 299, k[299:], v[299:], q[299:], 300)], SCALE)
    for got, first in ((out, 0), (last, 299)):
        want = plainly(precision, k, v, q, first, len(got))
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
