"""ChanMix: who has how many bits, against loops over channels and tokens; what a segment holds; what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.data_gen.haystack import first_words
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Extent
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.bits.chanmix import FP8, ChanMix, OfChannels, Planes, by_range, retrieval_scores
from leank.eval.methods.memory import method_bytes
from leank.eval.run.replay import Replay, Settings, cache_bytes
from tests.helpers.cache_oracle import HEADS, left_padded, tiny_model

DIM = 32


def bits_by_hand(ranges, free):
    """Bits of channels by lists: ranges, and whether each is in a head that is no retrieval head."""
    means = [min(ranges), sorted(ranges)[(len(ranges) - 1) // 2], max(ranges)]
    kinds = None
    while True:
        found = [min(range(3), key=lambda i: (abs(r - means[i]), i)) for r in ranges]
        if found == kinds:
            break
        kinds = found
        for i in range(3):
            own = [r for r, kind in zip(ranges, kinds, strict=True) if kind == i]
            means[i] = sum(own) / len(own) if own else means[i]
    outliers = [c for c in range(len(ranges)) if kinds[c] == 2 and free[c]]
    low = [c for c in range(len(ranges)) if kinds[c] == 0 and free[c]]
    count = min(len(outliers), len(low))
    bits = [2 if x else 4 for x in free]
    for c in sorted(outliers, key=lambda c: -ranges[c])[:count]:
        bits[c] = 3
    for c in sorted(low, key=lambda c: ranges[c])[:count]:
        bits[c] = 1
    return bits


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=24), st.integers(0, 15))
def test_ranges_give_bits_as_lists_do(numbers, heads):
    """Also with equal ranges, with fewer subnormal channels than outliers, and under retrieval heads."""
    ranges = torch.tensor(numbers[: len(numbers) // 4 * 4], dtype=torch.float64).view(4, -1)
    free = torch.tensor([bool(heads >> h & 1) for h in range(4)])[:, None].expand_as(ranges)
    found = by_range(ranges, free)
    assert found.flatten().tolist() == bits_by_hand(ranges.flatten().tolist(), free.flatten().tolist())
    assert float(found[free].sum()) == 2 * int(free.sum())


def test_a_few_wide_channels_are_outliers_and_as_many_narrow_ones_pay():
    ranges = torch.tensor([[9.0, 4.0, 4.1, 1.0], [3.9, 1.1, 0.9, 4.2]]).double()
    assert by_range(ranges, torch.ones(2, 4, dtype=torch.bool)).tolist() == [[3, 2, 2, 2], [2, 2, 1, 2]]


@pytest.mark.parametrize("observed", [60, 37])
def test_retrieval_scores_are_the_attention_to_earlier_sentences(observed):
    """Of a prompt whose first queries were not kept, too."""
    model, sentence = tiny_model("llama"), 7
    ids, _ = left_padded([60], 3)
    dense = prefill(model, ids, None, 0, obs_queries=observed)
    for found, layer in zip(retrieval_scores(dense, sentence), dense.layers, strict=True):
        first = 60 - observed
        want = torch.zeros(HEADS, dtype=torch.float64)
        for q in range(layer.queries.shape[1]):
            keys = layer.keys[0, q // 2]
            for i in range(first, 60):
                near = first + (i - first) // sentence * sentence - sentence
                weights = (keys[: i + 1] @ layer.queries[0, q, i - first] / keys.shape[-1] ** 0.5).softmax(0)
                want[q // 2] += sum(float(w) for j, w in enumerate(weights) if 4 <= j < near)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def by_hand(x, bits, form):
    """A group x [n] as it is read back: of all levels the nearest."""
    low, high = x.min().float(), x.max().float()
    scale, zero = torch.stack([(high - low) / (2**bits - 1), low]).to(x.dtype)
    if form is not None:
        scale, zero = (y.clamp(-240, 240).to(form).to(x.dtype) for y in (scale, zero))
    levels = zero.double() + torch.arange(2**bits) * scale.double()
    nearest = (x.double()[:, None] - levels).abs().argmin(-1)
    return levels[nearest].to(x.dtype)


@settings(max_examples=9, derandomize=True)
@given(
    st.sampled_from([8, 16, 32]), st.sampled_from([None, FP8]), st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 70), st.integers(0, 999),
)  # fmt: skip
def test_a_segment_holds_what_loops_say(group, form, dtype, appends, last, seed):
    """Heads of other widths, room that grows, a short last group."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randint(1, 5, (3, DIM), generator=generator).tolist()
    of_values = (2, 4, 2)
    heads = [[tuple(sorted(k, reverse=True)), (v,) * DIM] for k, v in zip(widths, of_values, strict=True)]
    codec = OfChannels(tuple(tuple(Planes(x, group, form) for x in head) for head in heads), tuple(map(tuple, widths)))
    channels = KeptChannels.of(None, torch.empty(1, 3, 0, DIM), codec.order)
    segment = codec.segment(Extent(channels, np.full((1, 3), 64), DIM, dtype))
    want, given = ([([], []) for _ in range(3)] for _ in range(2))
    for tokens in [n * group for n in appends] + [last]:
        k, v = torch.randn(2, 1, 3, tokens, DIM, generator=generator).to(dtype)
        segment = segment.grown(segment.capacity + tokens * (segment.capacity > 0))
        segment.append(np.array([0]), k, v)
        for h in range(3):
            cells = k[0, h].split(group) if tokens else ()
            of_keys = [torch.stack([by_hand(*x, form) for x in zip(c.T, widths[h], strict=True)], 1) for c in cells]
            rows = [torch.cat([by_hand(x, of_values[h], form) for x in token.split(group)])[None] for token in v[0, h]]
            for to, new in zip((*want[h], *given[h]), (of_keys, rows, [k[0, h]], [v[0, h]]), strict=True):
                to += new
    rough = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for h in range(3):
        k, v = segment.read(0, h)
        k = torch.zeros_like(k).index_copy(1, channels.index[0, h].long(), k)
        for got, pieces, x in zip((k, v), want[h], given[h], strict=True):
            wanted, x = torch.cat([got[:0], *pieces]), torch.cat(x)  # of two levels as near, either may be taken
            torch.testing.assert_close((got - x).abs(), (wanted - x).abs(), rtol=rough, atol=rough)
    k, v = segment.held()
    size = 1 if form else dtype.itemsize
    groups = -(-segment.length[0, 0] // group)
    assert k == sum(groups * (sum(of_head) * group // 8 + DIM * 2 * size) for of_head in widths)
    assert v == sum(int(segment.length[0, 0]) * (DIM * bits // 8 + DIM // group * 2 * size) for bits in of_values)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_channels_of_one_width_come_back_as_those_of_kivi(bits, keys):
    x = torch.randn(2, 64, DIM, generator=torch.Generator().manual_seed(bits)).bfloat16()
    mixed, plain = Planes((bits,) * DIM, 16), Packing(bits, 16)
    found, wanted = (codec.decode(*codec.encode(x, keys), keys) for codec in (mixed, plain))
    assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def reference():
    """(the reference model, a replay of it, a pass over a text)."""
    model, (_, tokenizer) = load_model(ModelConfig()), load_config(ModelConfig())
    ids = torch.tensor([tokenizer(" ".join(first_words(500, None, "all"))).input_ids[:600]])
    return model, Replay(model, tokenizer, Settings()), prefill(model, ids, None, 8)


@pytest.mark.parametrize("retrieval", [0.0, 0.3])
def test_the_reference_model_decodes_over_the_bits_of_its_heads(retrieval, reference):
    """Its next distributions are nearer to dense's than those of `kivi` in 2 bits; bytes are those of the plan."""
    model, replay, dense = reference
    own = {"name": "chanmix", "retrieval": retrieval, "length": 1024, "samples": 1}
    made = [
        build_method(name, {"bits": bits}, {"sink": 16, "window": 64})
        for name, bits in (("mixed", own), ("plain", {"name": "kivi", "bits": 2}))
    ]
    replay.calibrate(made)
    of_keys, of_values = made[0].bits.widths
    free = of_values == 2
    assert int((~free).sum()) == round(retrieval * free.numel())
    assert (of_keys[~free] == 4).all()
    assert set(of_keys[free].unique().tolist()) == {1, 2, 3}
    assert of_keys[free].double().mean() == 2
    far = []
    for cache in [dense.fork(), *(one.cache(model, dense) for one in made)]:
        token = dense.logits.argmax(-1, keepdim=True)
        far.append(model(token, past_key_values=cache).logits[0, -1].log_softmax(-1))
    true, *others = far
    mixed, plain = (float((true.exp() * (true - other)).sum()) for other in others)
    assert 0 < mixed < plain
    (parts,) = cache_bytes(made[0].cache(model, dense), dense)
    held = parts["total"] - parts.get("tables", 0) - parts.get("slack", 0)
    assert held == pytest.approx(method_bytes(made[0], model.config, 600, 4), rel=0.01)


def test_what_is_refused():
    with pytest.raises(ValueError, match="flush=8 must be a multiple of group=32"):
        ChanMix().check_sizes(Sizes(2, 8, 8))
    _, tokenizer = load_config(ModelConfig())
    with pytest.raises(ValueError, match="length=128 must be at least"):
        ChanMix(length=128)._probe(tokenizer)
    with pytest.raises(ValueError, match="retrieval"):
        ChanMix(retrieval=1.0)
    channels = KeptChannels.of(torch.arange(DIM).expand(1, 1, DIM) < 8, torch.empty(1, 1, 0, DIM))
    codec = OfChannels(((Planes((2,) * DIM), Planes((2,) * DIM)),), ((2,) * DIM,))
    with pytest.raises(ValueError, match="leave out the choice of channels"):
        codec.segment(Extent(channels, np.full((1, 1), 64), DIM, torch.float32))
