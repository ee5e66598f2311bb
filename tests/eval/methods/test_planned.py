"""What a cache holds along a reply is known before, to the byte: spare slots and pages count, tables do not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes, bytes_per_row
from leank.eval.cache.graph import stores
from leank.eval.cache.storage.segment import GROWTH, grown_room, kept_room
from leank.eval.inference import decode
from leank.eval.methods import build_method
from leank.eval.methods.memory import planned_bytes
from leank.mask import ChannelMask
from tests.conftest import tiny_model
from tests.helpers.cache_oracle import left_padded
from tests.helpers.drawn import calibrated
from tests.helpers.layouts import layout_mask

LAYERS, HEADS, DIM = SHAPE = 2, 2, 32
EVICT = ("h2o", "tova", "keydiff", "triattention", "rkv")


def small_model(positions=1024):
    return tiny_model(
        "llama", vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, head_dim=DIM,
        num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, max_position_embeddings=positions,
        eos_token_id=None,
    ).float()  # fmt: skip


def mask():
    keep = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.5
    keep[1, 0] = False
    return ChannelMask(keep)


def chosen(name, sink, window, flush, budget):
    """A method that keeps `budget` tokens, or as many as sink and window, of those that have a budget."""
    budget = max(budget, sink + max(window, 4))
    snapkv = {"name": "snapkv", "budget": budget, "queries": 4}
    config = {
        "mask": {"channels": {"name": "leank", "mask": mask()}},
        "layout": {"channels": {"name": "leank", "mask": layout_mask(SHAPE, 3)}},
        "kivi4": {"bits": {"name": "kivi", "bits": 4}},
        "kivi": {"bits": {"name": "kivi", "bits": 2}},
        "snapkv, kivi4": {"tokens": snapkv, "bits": {"name": "kivi", "bits": 4}},
        "h2o, mask": {"tokens": {"name": "h2o", "budget": budget}, "channels": {"name": "leank", "mask": mask()}},
        "rkv": {"tokens": {"name": "rkv", "budget": budget, "queries": 4}},
        "streaming_llm": {"tokens": {"name": "streaming_llm"}},
        "pyramidkv": {"tokens": {"name": "pyramidkv", "budget": budget, "queries": 4}},
        "quest": {"reads": {"name": "quest", "budget": budget, "dense_layers": 0}},
    }.get(name) or {"tokens": {"name": name, "budget": budget}}  # fmt: skip
    flush = {"layout": 64, "kivi": 32, "kivi4": 32, "snapkv, kivi4": 32}.get(name, flush)
    return build_method("one", config, {"sink": sink, "window": window, "flush": flush, "backend": "torch"})


def held(cache):
    """Bytes of a cache but for its tables."""
    memory = cache.memory()
    return memory.total - memory.tables


NAMES = ("mask", "layout", "kivi4", "kivi", "snapkv, kivi4", "h2o, mask", "streaming_llm", "pyramidkv", "quest", *EVICT)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NAMES), sink=st.integers(0, 20), window=st.integers(4, 80), flush=st.integers(1, 90),
    budget=st.integers(1, 300), lengths=st.lists(st.integers(5, 300), min_size=1, max_size=3),
    parts=st.lists(st.integers(1, 130), min_size=1, max_size=4),
)  # fmt: skip
def test_any_method_holds_what_was_planned_wherever_its_reply_stands(name, sink, window, flush, budget, lengths, parts):
    if "h2o" in name or name in EVICT:  # whose scores are as long in every row
        lengths, parts = lengths[:1] * len(lengths), [min(part, 40) for part in parts]
    model, one = small_model(), chosen(name, sink, window, flush, budget)
    calibrated(one, model.config)
    ids, real = left_padded(lengths, 3)
    passed = one.run_prefill(model, ids, real, sum(parts))
    cache, new = one.cache(model, passed), 0
    assert held(cache) == planned_bytes(one, model.config, lengths, 0, 4)
    for part in parts:
        new += part
        tokens = torch.arange(part)[None].expand(len(lengths), -1) % 90 + 2
        real = torch.cat([real, torch.ones_like(tokens, dtype=torch.bool)], 1)
        decode.read(model, cache, tokens, real)
        assert held(cache) == planned_bytes(one, model.config, lengths, new, 4)
    if name == "mask":
        sizes = Sizes(sink, window, one.flush)
        if min(lengths) > sink + window:
            rows = [bytes_per_row(mask(), length, torch.float32, sizes, reply=new) for length in lengths]
            assert held(cache) == sum(rows)


@pytest.mark.parametrize("name", ["mask", "layout", "kivi4", "rkv"])
def test_a_reply_of_20000_tokens_holds_what_was_planned_at_every_thousand(name):
    """Tokens of random keys and values, many at a time, straight into the layers' stores."""
    flush = 512 if name == "rkv" else 64  # of a method that evicts, no more come than leave the window at a time
    model, one, step = small_model(), chosen(name, 64, 128, flush, 300), 250
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 97, (1, 1000), generator=generator)
    cache, planned = one.cache(model, one.run_prefill(model, ids, None, 1)), []
    for new in range(step, 20_001, step):
        for store in stores(cache):
            store.append(*torch.randn(2, 1, HEADS, step, DIM, generator=generator))
            if store.eviction is not None:
                columns = int(store.held().max())
                store.eviction.add(torch.rand(HEADS, columns, generator=generator), store.held())
            store.flush()
        if new % 1000 == 0:
            planned.append(planned_bytes(one, model.config, [1000], new, 4))
            assert held(cache) == planned[-1]
    assert len(planned) == 20
    assert (planned[-1] < 1.01 * planned[5]) == (name == "rkv")  # whose budget holds


@given(st.integers(0, 10**7))
def test_room_grows_with_the_tokens_by_a_sixteenth_at_most(tokens):
    room, more = grown_room(np.array([tokens, tokens + 1]))
    assert tokens <= room <= more
    assert room - tokens < max(GROWTH, tokens / 16)
    assert grown_room(room) == room
    capacity = np.array([[room, 0]])
    kept = kept_room(capacity, np.array([[tokens, 0]]), 32)
    assert kept is capacity
    assert kept_room(capacity, np.array([[tokens // 4, 0]]), 32)[0, 0] in (room, grown_room(tokens // 4))
