"""cache.generate(): transformers' own generate(), whose steps replay a captured graph where they can."""

import copy
from functools import partial

import pytest
import torch
from transformers import StoppingCriteria

from leank.eval.cache import compressed_cache, graph
from leank.eval.cache.generate import graph_decoding
from leank.eval.cache.graph import DecodeLoop
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.inference.models import ModelConfig, load_model
from tests.helpers.cache_oracle import tiny_model
from tests.helpers.captured import Fake
from tests.helpers.text_tokenizers import tokenizer


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


def held(cache):
    """All that a cache holds, as far as anybody may read it."""
    found = [cache.get_seq_length()]
    for layer in cache.layers:
        store = layer.store
        assert store.seen.tolist() == store.seen_dev.tolist()
        assert store.start.tolist() == store.start_dev.tolist()
        for row, (start, seen) in enumerate(zip(store.start.tolist(), store.seen.tolist(), strict=True)):
            slots = torch.arange(start, seen) % store.ring_k.shape[2]
            found += [start, seen, *(ring[row, :, slots].tolist() for ring in (store.ring_k, store.ring_v))]
            for head in range(store.ring_k.shape[1]):
                for part in (store.prompt, store.tail):
                    found += [tensor.tolist() for tensor in part.read(row, head)]
    return found


def compare_ends(model, sizes, options, steps, plain, replayed):
    """Rows that end at `steps` give the same from both, leave the same caches, and a later turn goes on alike.

    plain, replayed: run(cache, options) -> what generate() returns
    """
    copies, length = options.get("num_return_sequences", 1), options["input_ids"].shape[1]

    def run(how, cache, **more):
        torch.manual_seed(1)
        return how(cache, {**options, **more})

    caches = [compressed_cache(model, random_mask(model.config), *sizes) for _ in range(3)]
    free = run(plain, caches[0], min_new_tokens=options["max_new_tokens"])
    free = (free if isinstance(free, torch.Tensor) else free.sequences)[:, length:]
    ends = [int(tokens[steps[row // copies]]) for row, tokens in enumerate(free)]
    want, got = (run(how, cache, eos_token_id=ends) for how, cache in zip((plain, replayed), caches[1:], strict=True))
    assert same(want, got)
    assert held(caches[1]) == held(caches[2])
    ids = got if isinstance(got, torch.Tensor) else got.sequences
    assert length < ids.shape[1] < length + options["max_new_tokens"]
    more = torch.cat([ids, torch.full((len(ids), 3), 9).to(ids)], 1)
    mask = torch.cat([options["attention_mask"].repeat_interleave(copies, 0), torch.ones_like(more[:, length:])], 1)
    turn = {"input_ids": more, "attention_mask": mask, "do_sample": False, "num_return_sequences": 1}
    turns = (run(how, cache, **turn) for how, cache in zip((plain, replayed), caches[1:], strict=True))
    assert same(*turns)
    assert held(caches[1]) == held(caches[2])


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

    def __init__(self, until=None):
        self.got, self.ended, self.until = [], False, until

    def put(self, tokens):
        self.got += tokens.flatten().tolist()
        if len(self.got) == self.until:
            raise KeyboardInterrupt

    def end(self):
        self.ended = True


@pytest.fixture
def captured(monkeypatch):
    """Let generate() capture and replay steps as it does on a GPU."""
    monkeypatch.setattr("leank.eval.cache.generate.DecodeLoop", Fake)
    for user in ("generate", "graph"):
        monkeypatch.setattr(f"leank.eval.cache.{user}.capturable", lambda cache: True)
    for name in ("captures", "begun", "undone"):
        monkeypatch.setattr(Fake, name, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "captured"])
def test_the_result_is_that_of_generate(way, replayed, request):
    if replayed:
        request.getfixturevalue("captured")
    model = tiny_model("llama")
    options = {**prompts(), **WAYS[way], "max_new_tokens": 30}

    def run(how):
        torch.manual_seed(0)
        cache = compressed_cache(model, random_mask(model.config), *SIZES)
        return how(cache)

    want = run(lambda cache: model.generate(past_key_values=cache, **options))
    assert same(want, run(lambda cache: cache.generate(model, **options)))
    assert same(want, run(lambda c: model.generate(past_key_values=c, custom_generate=graph_decoding, **options)))
    if replayed:
        runs = 0 if way == "beams" else 2
        assert Fake.captures == runs
        assert Fake.begun == runs * 27  # the first token is the prompt's, the second step captures, and it runs at once
        assert not Fake.undone


@pytest.mark.parametrize("where", ["call", "configuration"])
def test_strings_that_end_a_reply(where, captured):
    """transformers gives a custom_generate no tokenizer, and then refused the strings for want of one."""
    model, words = tiny_model("llama"), tokenizer("reference")
    options = {"input_ids": prompts()["input_ids"][:1], "do_sample": False, "max_new_tokens": 30, "tokenizer": words}

    def run(own, **more):
        cache = compressed_cache(model, random_mask(model.config), *SIZES)
        if own:
            return cache.generate(model, **options, **more)
        return model.generate(past_key_values=cache, **options, **more)

    long = run(False)
    stop = words.decode(long[0, -12:-10])
    more = {"stop_strings": [stop]} if where == "call" else {"generation_config": copy.copy(model.generation_config)}
    if where == "configuration":
        more["generation_config"].stop_strings = [stop]
    want = run(False, **more)
    assert want.shape[1] < long.shape[1]
    assert torch.equal(run(True, **more), want)
    assert bool(Fake.captures) == (where == "call")


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        *(("greedy", steps) for steps in ((7, 19, 12), (20, 9, 20), (21, 3, 4))),
        *((way, (20, 9, 20)) for way in ("sampling", "several of each", "processors and scores")),
    ],
    ids=str,
)
def test_rows_that_end_at_different_steps_leave_the_cache_as_the_plain_loop_does(way, steps, captured):
    """Windows hold 16 to 20 tokens: the last step comes before, with and after tokens that leave one."""
    model = tiny_model("llama")
    options = {**prompts(), **WAYS[way], "max_new_tokens": 40}
    plain = lambda cache, given: model.generate(past_key_values=cache, **given)  # noqa: E731
    compare_ends(model, SIZES, options, steps, plain, lambda cache, given: cache.generate(model, **given))
    assert Fake.undone


class Watching(StoppingCriteria):
    """A user's criterion: it notes what it is given and how much the cache holds, and ends rows after a while."""

    def __init__(self, cache, raises=False):
        self.cache, self.raises, self.seen = cache, raises, []

    def __call__(self, input_ids, scores, **kwargs):
        held = [layer.store.seen_dev.tolist() for layer in self.cache.layers]
        self.seen.append((input_ids.tolist(), held, None if scores is None else len(scores)))
        if self.raises and len(self.seen) == 25:
            raise KeyboardInterrupt
        return torch.full((len(input_ids),), len(self.seen) == 28)


def test_criteria_are_asked_after_every_token_and_before_the_next_step(captured):
    model, found = tiny_model("llama"), []
    for ours in (False, True):
        cache = compressed_cache(model, random_mask(model.config), *SIZES)
        watching = Watching(cache)
        options = {**prompts(), "do_sample": False, "max_new_tokens": 60, "stopping_criteria": [watching]}
        out = cache.generate(model, **options) if ours else model.generate(past_key_values=cache, **options)
        found.append((out.tolist(), watching.seen, held(cache)))
    assert found[0] == found[1]
    assert Fake.begun > 20
    assert Fake.undone == 1


@pytest.mark.parametrize("where", ["criterion", "streamer"])
def test_what_breaks_off_leaves_the_cache_as_the_plain_loop_does(where, captured):
    model, found = tiny_model("llama"), []
    for ours in (False, True):
        cache = compressed_cache(model, random_mask(model.config), *SIZES)
        options = {"input_ids": prompts()["input_ids"][1:2], "do_sample": False, "max_new_tokens": 60}
        if where == "criterion":
            options["stopping_criteria"] = [Watching(cache, raises=True)]
        else:
            options["streamer"] = Streamer(until=70)
        with pytest.raises(KeyboardInterrupt):
            _ = cache.generate(model, **options) if ours else model.generate(past_key_values=cache, **options)
        found.append(held(cache))
    assert found[0] == found[1]
    assert Fake.begun > 20
    assert Fake.undone == (where == "streamer")  # a user's criterion comes before the next step


def test_a_step_that_adds_to_scores_cannot_be_taken_back():
    model = tiny_model("llama")
    middles = [Middle(keep, eviction=HeavyHitters(8)) for keep in random_mask(model.config)]
    for middle, can in ((middles, False), (None, True)):
        cache = compressed_cache(model, middle, *SIZES)
        model(input_ids=prompts()["input_ids"], past_key_values=cache)
        assert graph.retractable(cache) is can


def test_a_streamer_gets_every_token_once():
    model, streamer = tiny_model("llama"), Streamer()
    cache = compressed_cache(model, random_mask(model.config), *SIZES)
    ids = prompts()["input_ids"][:1]
    out = cache.generate(model, input_ids=ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.got == out[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("how", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}])
def test_assisted_decoding_runs_as_usual(how, monkeypatch):
    model = tiny_model("llama")
    options = {"input_ids": prompts()["input_ids"][:1], "max_new_tokens": 8, **how}
    caches = [compressed_cache(model, None, *SIZES) for _ in range(3)]
    want = model.generate(past_key_values=caches[0], **options)
    with monkeypatch.context() as patch:
        patch.delattr(DecodeLoop, "step")
        assert torch.equal(caches[1].generate(model, **options), want)
    with pytest.raises(ValueError, match="cannot assist decoding; leave custom_generate out"):
        model.generate(past_key_values=caches[2], custom_generate=graph_decoding, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [way for way in WAYS if way != "beams"])
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
def test_a_captured_call_gives_the_tokens_of_an_eager_one(way, padded, captures, monkeypatch):
    model = load_model(ModelConfig())
    options = {**prompts(4000, model.device, 400), **WAYS[way], "max_new_tokens": 100, "min_new_tokens": 100}
    if not padded:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
    found = []
    for least in (1000, graph.CAPTURE_FOR):  # never captured, captured
        monkeypatch.setattr("leank.eval.cache.generate.CAPTURE_FOR", least)
        torch.manual_seed(0)
        cache = compressed_cache(model, random_mask(model.config), 16, 96)
        found.append(cache.generate(model, **options))
        assert cache.get_seq_length() == 499
    assert captures == [1]
    assert same(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["greedy", "sampling", "several of each"])
@pytest.mark.parametrize("steps", [(70, 25, 40), (33, 34, 33)], ids=str)
def test_rows_that_end_leave_the_cache_of_an_eager_call(way, steps, monkeypatch):
    model, undone, take_back = load_model(ModelConfig()), [], DecodeLoop.take_back
    monkeypatch.setattr(DecodeLoop, "take_back", lambda loop: (undone.append(loop._begun), take_back(loop)))
    options = {**prompts(4000, model.device, 400), **WAYS[way], "max_new_tokens": 120}

    def run(least, cache, given):
        monkeypatch.setattr("leank.eval.cache.generate.CAPTURE_FOR", least)
        return cache.generate(model, **given)

    compare_ends(model, (16, 96), options, steps, partial(run, 1000), partial(run, graph.CAPTURE_FOR))
    assert True in undone


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{}, {"bits": Packing(4, 32)}, {"center": torch.linspace(-1, 1, 256).view(4, 64)}])
def test_later_calls_replay_what_the_first_captured(form, captures, monkeypatch):
    """After a reset with prompts of other lengths, and in another turn; only other rows are captured anew."""
    model = load_model(ModelConfig())
    middles = [Middle(keep, **form) for keep in random_mask(model.config)]

    def run(cache, length, rows=2, **more):
        ids = torch.randint(5, 4000, (rows, length), generator=torch.Generator().manual_seed(length)).to(model.device)
        options = {"max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False, "pad_token_id": 0}
        return cache.generate(model, input_ids=ids, **options, **more)

    kept = compressed_cache(model, middles, 16, 96)
    for length, rows, so_far in ((400, 2, 1), (900, 2, 1), (150, 2, 1), (400, 1, 2), (1200, 1, 2)):
        found = run(kept, length, rows)
        assert len(captures) == so_far
        monkeypatch.setattr("leank.eval.cache.generate.CAPTURE_FOR", 1000)  # the other cache decodes step by step
        assert torch.equal(found, run(compressed_cache(model, middles, 16, 96), length, rows))
        monkeypatch.setattr("leank.eval.cache.generate.CAPTURE_FOR", graph.CAPTURE_FOR)
        kept.reset()
