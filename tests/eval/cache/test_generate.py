"""cache.generate(): transformers' own generate(), whose steps replay a captured graph where they can."""

import pytest
import torch

from eval.cache import compressed_cache, graph
from eval.cache.generate import graph_decoding
from eval.cache.graph import DecodeLoop
from eval.cache.storage.middle import Middle
from eval.cache.storage.quantised import Packing
from eval.inference.models import ModelConfig, load_model
from tests.helpers.cache_oracle import tiny_model

SIZES = 4, 16, 4
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "processors and scores": {
        "do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    },
}  # fmt: skip


class Streamer:
    """Collects what it is given."""

    def __init__(self):
        self.got, self.ended = [], False

    def put(self, tokens):
        self.got += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def prompts(vocabulary=50, device="cpu", length=40):
    """Three rows, the first padded on the left."""
    ids = torch.randint(5, vocabulary, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def random_mask(config):
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return torch.equal(first.sequences, second.sequences) and all(
        torch.equal(a, b) for name in ("scores", "logits") for a, b in zip(first[name], second[name], strict=True)
    )


class Fake(DecodeLoop):
    """A loop that only claims to have captured: its steps are forward passes without a mask, as a graph's are."""

    captures = 0

    def capture(self):
        Fake.captures += 1
        self._graph = object()

    def step(self, tokens, mask=None):
        return self._forward(tokens, mask if self._graph is None else None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_result_is_that_of_generate(way, captured, monkeypatch):
    model = tiny_model("llama")
    if captured:
        monkeypatch.setattr("eval.cache.generate.DecodeLoop", Fake)
        monkeypatch.setattr("eval.cache.generate.capturable", lambda cache: True)
        monkeypatch.setattr(Fake, "captures", 0)
    options = {**prompts(), **WAYS[way], "max_new_tokens": 30}

    def run(how):
        torch.manual_seed(0)
        cache = compressed_cache(model, random_mask(model.config), *SIZES)
        return how(cache)

    want = run(lambda cache: model.generate(past_key_values=cache, **options))
    assert same(want, run(lambda cache: cache.generate(model, **options)))
    assert same(want, run(lambda c: model.generate(past_key_values=c, custom_generate=graph_decoding, **options)))
    if captured:
        assert Fake.captures == (0 if way == "beams" else 2)


def test_a_streamer_gets_every_token_once():
    model, streamer = tiny_model("llama"), Streamer()
    cache = compressed_cache(model, random_mask(model.config), *SIZES)
    ids = prompts()["input_ids"][:1]
    out = cache.generate(model, input_ids=ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.got == out[0].tolist()
    assert streamer.ended


def test_assisted_decoding_runs_as_usual():
    model = tiny_model("llama")
    options = {"input_ids": prompts()["input_ids"][:1], "max_new_tokens": 8, "prompt_lookup_num_tokens": 3}
    caches = [compressed_cache(model, None, *SIZES) for _ in range(3)]
    want = model.generate(past_key_values=caches[0], **options)
    assert torch.equal(caches[1].generate(model, **options), want)
    with pytest.raises(ValueError, match="cannot assist decoding; leave custom_generate out"):
        model.generate(past_key_values=caches[2], custom_generate=graph_decoding, **options)


def test_a_second_turn_on_the_same_cache():
    model = tiny_model("llama")
    first = prompts()["input_ids"][:1]
    more = torch.full((1, 5), 9)
    found = []
    for ours in (False, True):
        cache, ids = compressed_cache(model, random_mask(model.config), *SIZES), first
        for turn in range(2):
            ids = torch.cat([ids, more], 1) if turn else ids
            options = {"input_ids": ids, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            ids = cache.generate(model, **options) if ours else model.generate(past_key_values=cache, **options)
        found.append(ids)
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [way for way in WAYS if way != "beams"])
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
def test_a_captured_call_gives_the_tokens_of_an_eager_one(way, padded, monkeypatch):
    model = load_model(ModelConfig())
    options = {**prompts(4000, model.device, 400), **WAYS[way], "max_new_tokens": 100, "min_new_tokens": 100}
    if not padded:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
    captures, capture = [], DecodeLoop.capture
    monkeypatch.setattr(DecodeLoop, "capture", lambda loop: (captures.append(1), capture(loop)))
    found = []
    for least in (1000, graph.CAPTURE_FOR):  # never captured, captured
        monkeypatch.setattr("eval.cache.generate.CAPTURE_FOR", least)
        torch.manual_seed(0)
        cache = compressed_cache(model, random_mask(model.config), 16, 96)
        found.append(cache.generate(model, **options))
        assert cache.get_seq_length() == 499
    assert captures == [1]
    assert same(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 4])
def test_later_calls_replay_what_the_first_captured(bits, monkeypatch):
    """After a reset with prompts of other lengths, and in another turn; only other rows are captured anew."""
    model = load_model(ModelConfig())
    mask = random_mask(model.config)
    middles = [Middle(keep, bits=None if bits is None else Packing(bits, 32)) for keep in mask]
    captures, capture = [], DecodeLoop.capture
    monkeypatch.setattr(DecodeLoop, "capture", lambda loop: (captures.append(1), capture(loop)))

    def run(cache, length, rows=2, **more):
        ids = torch.randint(5, 4000, (rows, length), generator=torch.Generator().manual_seed(length)).to(model.device)
        options = {"max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False, "pad_token_id": 0}
        return cache.generate(model, input_ids=ids, **options, **more)

    kept = compressed_cache(model, middles, 16, 96)
    for length, rows, so_far in ((400, 2, 1), (900, 2, 1), (150, 2, 1), (400, 1, 2), (1200, 1, 2)):
        found = run(kept, length, rows)
        assert len(captures) == so_far
        monkeypatch.setattr("eval.cache.generate.CAPTURE_FOR", 1000)  # the other cache decodes step by step
        assert torch.equal(found, run(compressed_cache(model, middles, 16, 96), length, rows))
        monkeypatch.setattr("eval.cache.generate.CAPTURE_FOR", graph.CAPTURE_FOR)
        kept.reset()
