"""KVTuner's search: the best pairs of all, bytes that are known before it, and errors as by hand."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.bits.kvtuner import PAIRS, WIDTHS, KVTuner, found_pairs
from leank.eval.methods.memory import method_bytes, planned_bytes
from leank.eval.run.replay import cache_bytes
from tests.conftest import tiny_model


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.floats(2, 8), st.integers(0, 999))
def test_the_pairs_are_the_best_of_all_that_have_so_many_bits(layers, bits, seed):
    errors = np.random.default_rng(seed).random((layers, 9))
    mean = {some: sum(WIDTHS[k] + WIDTHS[v] for k, v in (PAIRS[p] for p in some)) / 2 / layers
            for some in product(range(9), repeat=layers)}  # fmt: skip
    most = max(m for m in mean.values() if m <= bits + 1e-6)
    assert most > bits - 1 / layers - 1e-6 or bits == pytest.approx(8, abs=2)
    best = min((some for some in mean if mean[some] == most), key=lambda some: sum(errors[range(layers), some]))
    assert tuple(found_pairs(errors, bits)) == best


def small_model():
    return tiny_model("llama", head_dim=32, num_hidden_layers=2, initializer_range=0.3, max_position_embeddings=256)


def calibrated(model, loud=None, **options):
    """A method that has seen one sample of random tokens; loud: a layer whose errors count more."""
    one = build_method(
        "one",
        {"bits": {"name": "kvtuner", "samples": 1, "queries": 8, **options}},
        {"sink": 4, "window": 32},
    )
    ids = torch.randint(3, 49, (1, 150), generator=torch.Generator().manual_seed(0))
    seen = prefill(model, ids, None, 8, 8)
    found = one.bits.of_samples(iter([seen]))
    if loud is not None:
        found[loud] *= 100
    one.bits._found[one.bits.calibrated_on] = found
    return one, seen, found


def test_errors_are_those_of_attention_by_hand():
    model = small_model().double()
    one, seen, found = calibrated(model)
    layer, group, dim = seen.layers[1], one.bits.group, seen.layers[1].keys.shape[-1]
    heads, count = layer.keys.shape[1], (150 - 8) // group * group
    for (a, k_bits), (b, v_bits) in product(enumerate(WIDTHS), repeat=2):
        off = total = 0.0
        for query in range(layer.queries.shape[1]):
            head = query // (layer.queries.shape[1] // heads)
            k, v = layer.keys[0, head, :count], layer.values[0, head, :count]

            def rounded(x, bits):
                """Groups along the last axis."""
                x = x.unflatten(-1, (-1, group))
                low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
                step = (high - low) / (2**bits - 1)
                return (((x - low) / step).round() * step + low).flatten(-2)

            q = layer.queries[0, query, -8:]
            want, got = (
                (q @ keys.mT / dim**0.5).softmax(-1) @ values
                for keys, values in ((k, v), (rounded(k.mT, k_bits).mT, rounded(v, v_bits)))
            )
            off, total = off + float((got - want).abs().sum()), total + float(want.abs().sum())
        assert found[1, a, b] == pytest.approx(off / total, rel=1e-9)


def test_bytes_are_known_before_the_search_and_a_loud_layer_gets_more_bits():
    model = small_model().float()
    one, seen, _ = calibrated(model, loud=1, bits=4.0)
    before = build_method("one", {"bits": {"name": "kvtuner", "bits": 4.0}}, {"sink": 4, "window": 32})
    kivi = build_method("one", {"bits": {"name": "kivi", "bits": 4}}, {"sink": 4, "window": 32})
    tokens = 36 + 64
    assert len({method_bytes(some, model.config, tokens, 4) for some in (one, before, kivi)}) == 1
    quiet, loud = (sum(codec.bits for codec in one.bits.of_layer(index, seen).heads[0]) for index in range(2))
    assert loud > quiet
    (parts,) = cache_bytes(one.cache(model, seen), seen)
    assert parts["total"] - parts["tables"] == planned_bytes(one, model.config, [150], 0, 4)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"flush=16 must be a multiple of group=32"):
        build_method("one", {"bits": {"name": "kvtuner"}}, {"flush": 16})
    with pytest.raises(RuntimeError, match="must be calibrated before it is used"):
        KVTuner().of_layer(0, prefill(small_model(), torch.tensor([[3, 4]]), None, 0))
    layer = prefill(small_model(), torch.arange(3, 43)[None], None, 0, 32).layers[0]
    with pytest.raises(ValueError, match="a sample of 40 tokens has no group of 32 before queries=32; raise length"):
        KVTuner().errors(layer)
