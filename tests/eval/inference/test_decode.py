"""The decoding loop: which caches become CUDA graphs, and that graphs give what an eager loop gives."""

from types import SimpleNamespace

import pytest
import torch

from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.graph import DecodeLoop, capturable
from leank.eval.inference import decode
from leank.eval.inference.decode import greedy
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.inference.prefill import pad_left, prefill
from leank.eval.methods import build_method
from tests.helpers.cache_oracle import tiny_model

NEW = 100  # three flushes of 32


@pytest.mark.filterwarnings("ignore:attention over the compressed cache")
def test_only_caches_that_the_kernel_reads_whole_are_captured():
    model = tiny_model("llama")
    config = model.config
    keep = torch.ones(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype=torch.bool)
    cache = compressed_cache(model, keep, 4, 16)
    prompt = torch.arange(40)[None] + 5
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    assert not capturable(cache)  # nothing has been read yet
    DecodeLoop(model, cache, torch.tensor([[40]])).step(torch.tensor([[7]]))
    assert cache.get_seq_length() == 41
    assert isinstance(cache.layers[0].backend, Plain)
    assert not capturable(cache)
    for layer in cache.layers:
        layer.backend = SimpleNamespace(captures=True)
    assert capturable(cache)
    cache.layers[1].store.seen[0] = 3  # shorter than the sink
    assert not capturable(cache)
    assert not capturable(prefill(model, prompt, None, 8).fork())


def written_one_by_one(model, ids, eos, most, least):
    """Greedy tokens after the prompt ids [1, T], the end-of-text token that ended them included."""
    tokens = []
    while len(tokens) < most and not (tokens and tokens[-1] in eos):
        with torch.no_grad():
            logits = model(torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1)).logits[0, -1]
        if len(tokens) < least:
            logits[eos] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens


def test_rows_end_at_their_own_bounds_and_no_step_follows_the_last():
    model, prompts = tiny_model("llama"), [[7, 8, 9, 4], [5, 6], [11, 3, 2]]
    free = written_one_by_one(model, torch.tensor(prompts[:1]), [], 12, 0)
    for at in (0, 3, 5):
        eos = free[at : at + 2]  # with at least at + 1 tokens, the last of them is the first of these if it may be
        for most, least in (([6, 1, 9], [0, 0, 0]), ([8, 8, 0], [at + 1, 0, 0]), ([1, 8, 1], [1, 0, 0]),
                            ([8, 8, 9], [at, 0, at + 2])):  # fmt: skip
            ids, real = pad_left(prompts, 0, "cpu")
            dense = prefill(model, ids, real, max(most))
            found, steps, broken = greedy(model, dense.fork(), dense.logits, real, dense.lengths, eos, most, least)
            rows = zip(prompts, most, least, strict=True)
            wanted = [written_one_by_one(model, torch.tensor([p]), eos, n, m) for p, n, m in rows]
            assert found == [[token for token in row if token not in eos] for row in wanted]
            assert steps == max(map(len, wanted)) - 1  # the first token comes from the prompt's pass
            assert broken == [None] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {"channels": {"name": "lowest_frequencies", "ratio": 0.7}},
        {"channels": {"name": "think", "ratio": 0.6}, "bits": {"name": "kivi", "bits": 4}},
    ],
    ids=["static channels", "packed, channels of each prompt"],
)
@pytest.mark.parametrize("lengths", [[400, 400], [420, 180, 300]], ids=["equal", "padded"])
def test_a_captured_loop_gives_the_tokens_of_an_eager_one(config, lengths, monkeypatch):
    model = load_model(ModelConfig())
    chosen = build_method("one", config, {"sink": 16, "window": 96})
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 4000, (n,), generator=generator).tolist() for n in lengths]
    ids, real = pad_left(prompts, 0, model.device)
    captures, capture = [], DecodeLoop.capture
    monkeypatch.setattr(DecodeLoop, "capture", lambda loop: (captures.append(1), capture(loop)))
    found = []
    for least in (NEW, 16):  # never captured, captured
        monkeypatch.setattr(decode, "CAPTURE_FOR", least)
        dense = prefill(model, ids, real, NEW, chosen.obs_queries)
        cache, n = chosen.cache(model, dense), [NEW] * len(lengths)
        found.append(greedy(model, cache, dense.logits, real, dense.lengths, [], n, n))
    assert captures == [1]
    assert found[0] == found[1]
