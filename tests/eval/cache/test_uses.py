"""Unusual uses of a compressed cache: what the user hears, what must come out the same, and the bytes it counts."""

import functools
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from leank.eval.cache import CompressedCache, Sizes, bytes_per_row, compressed_cache, max_batch
from leank.eval.cache.attention import backend
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.memory import Memory
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import Store
from leank.mask import ChannelMask
from leank.versions import CACHE
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, random_keep, run, tiny_model
from tests.helpers.families import build
from tests.helpers.refusals import one_line

SIZES = (2, 6, 3)  # sink, window, flush
GREEDY = {"do_sample": False, "pad_token_id": 0}


def new_cache(model, keep=None, **options):
    """A cache of `SIZES` for the model."""
    return compressed_cache(model, keep, *SIZES, backend="torch", **options)


def feed(model, cache, *pieces, mask=None):
    """Logits of the last piece's last token."""
    seen = 0
    for piece in pieces:
        seen += piece.shape[1]
        with torch.no_grad():
            seen_mask = None if mask is None else mask[:, :seen]
            logits = model(piece, attention_mask=seen_mask, **{CACHE: cache}).logits
    return logits[:, -1]


@pytest.mark.parametrize("after", ["reset", "second turn"])
def test_recording_ends_after_assisted_decoding(after):
    """What follows prompt lookup is compressed as it is after plain greedy decoding."""
    model, keep = tiny_model("llama"), random_keep(3, empty=0)
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache, plain = new_cache(model, keep), new_cache(model, keep)
    reply = model.generate(ids, **{CACHE: cache}, prompt_lookup_num_tokens=4, max_new_tokens=12, **GREEDY)
    if after == "reset":
        cache.reset()
        got, want = (model.generate(ids, **{CACHE: c}, max_new_tokens=20, **GREEDY) for c in (cache, plain))
        assert torch.equal(got, want)
    else:
        more = torch.cat([reply, left_padded([5], 6)[0]], 1)
        model.generate(more, **{CACHE: cache}, max_new_tokens=20, **GREEDY)
    assert not any(layer.record_past for layer in cache.layers)
    for layer in cache.layers:
        assert SIZES[1] <= layer.store.seen - layer.store.start < SIZES[1] + SIZES[2]


def test_recording_ends_in_sliding_layers_too():
    model = tiny_model("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache = new_cache(model)
    reply = model.generate(ids, **{CACHE: cache}, prompt_lookup_num_tokens=4, max_new_tokens=12, **GREEDY)
    assert torch.equal(reply, model.generate(ids, max_new_tokens=12, **GREEDY))
    more = torch.cat([reply, left_padded([5], 6)[0]], 1)
    got = model.generate(more, **{CACHE: cache}, max_new_tokens=20, **GREEDY)
    assert torch.equal(got, model.generate(more, max_new_tokens=20, **GREEDY))
    assert cache.layers[1].keys.shape[2] == 15
    cache.reset()
    assert torch.equal(model.generate(ids, **{CACHE: cache}, max_new_tokens=12, **GREEDY), reply)


def test_tokens_taken_from_an_announced_prompt_come_again():
    """The prompt came whole; crop() took six tokens of it, and they are collected anew."""
    model, keep, ids = tiny_model("llama"), random_keep(5), left_padded([21], 5)[0]
    cache = new_cache(model, keep)
    cache.activate_past_recording()
    cache.expect(20)
    feed(model, cache, ids[:, :20])
    cache.crop(-6)
    feed(model, cache, ids[:, 14:17], ids[:, 17:20])
    cache.crop(0)
    torch.testing.assert_close(
        feed(model, cache, ids[:, 20:]), feed(model, new_cache(model, keep), ids[:, :20], ids[:, 20:])
    )


def test_chunks_that_nobody_announced_are_noticed():
    """Nothing says whether a chunk is the last of a prompt. With expect() the first token is the dense model's."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, mask = left_padded([40], 3)
    model.set_attn_implementation("sdpa")
    dense = run(model, DynamicCache(), ids, mask, 1, "sdpa")[1]
    with pytest.warns(RuntimeWarning, match=r"a pass of 9 tokens follows the prompt of 9 directly.*cache.expect\("):
        run(model, new_cache(model, keep), ids, mask, 1, ATTENTION, prefill_chunk_size=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = new_cache(model, keep)
        cache.expect(40)
        got = run(model, cache, ids, mask, 1, ATTENTION, prefill_chunk_size=9)[1]
        torch.testing.assert_close(got, dense)
        cache = new_cache(model, keep)  # a second turn, and assisted decoding, are no chunks
        turn = run(model, cache, ids, mask, 3, ATTENTION)[0]
        model.generate(torch.cat([turn, ids], 1), **{CACHE: cache}, max_new_tokens=2, **GREEDY)
        lookup = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 5, **GREEDY}
        model.generate(ids.repeat(1, 2), **{CACHE: new_cache(model, keep)}, **lookup)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_is_told_which_one_to_use(implementation):
    model = tiny_model("llama")
    cache = new_cache(model)
    model.set_attn_implementation(implementation)
    with pytest.raises(AttributeError, match=r'model.set_attn_implementation\("leank"\)') as error:
        feed(model, cache, left_padded([9], 1)[0])
    assert one_line(error)
    assert not hasattr(cache.layers[0], "nothing")


def test_another_model_is_told_to_have_its_own_cache():
    ids = left_padded([9], 1)[0]
    cache = new_cache(tiny_model("llama"))
    deeper = tiny_model("llama", num_hidden_layers=3)
    compressed_cache(deeper, None)
    with pytest.raises(ValueError, match="made for a model of 2 layers, and layer 2 asks for it") as error:
        feed(deeper, cache, ids)
    assert one_line(error)
    wider = tiny_model("qwen2", num_key_value_heads=4)
    compressed_cache(wider, None)
    with pytest.raises(ValueError, match="use the mask made for this model"):
        feed(wider, new_cache(tiny_model("llama"), random_keep(1)), ids)


@pytest.mark.parametrize("wide", ["keys", "values"])
def test_autocast(wide):
    """Rotary embeddings leave K in float32 beside V in bfloat16: both are held in the narrower type."""
    model = tiny_model("qwen3", torch.float32)
    ids, mask = left_padded([30, 12], 3)
    model.set_attn_implementation("sdpa")
    options = {"attention_mask": mask, "max_new_tokens": 12, **GREEDY}
    with torch.autocast("cpu", torch.bfloat16):
        cache = new_cache(model)
        out = model.generate(ids, **{CACHE: cache}, output_logits=True, return_dict_in_generate=True, **options)
        model.set_attn_implementation("sdpa")
        want = feed(model, DynamicCache(), ids, mask=mask)
    assert {t.dtype for n, t in cache.layers[0].store.tensors().items() if n.endswith(("_k", "_v"))} == {torch.bfloat16}
    torch.testing.assert_close(out.logits[0].float(), want.float(), rtol=0.05, atol=0.2)
    layer = new_cache(model).layers[0]
    k, v = torch.randn(2, 1, HEADS, 20, DIM)
    k, v = (k, v.bfloat16()) if wide == "keys" else (k.bfloat16(), v)
    layer.compress(k, v)
    assert layer.store.ring_k.dtype == layer.store.ring_v.dtype == torch.bfloat16


@settings(max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.integers(0, 4), st.integers(0, 99))
def test_crop_is_a_shorter_prompt_or_refused(lengths, right, remove, seed):
    """After a padded prompt crop() takes columns, so that no real token goes in place of a padding column."""
    model = tiny_model("llama")
    ids, mask = left_padded(lengths, seed)
    if right:
        ids, mask = ids.flip(1), mask.flip(1)
    remove, more = min(remove, ids.shape[1] - 1), torch.full((len(ids), 1), 7)
    cache = compressed_cache(model, None, 2, 12, 3, backend="torch")
    feed(model, cache, ids, mask=mask)
    behind_a_token = bool((mask[:, 1:] < mask[:, :-1]).any())
    if remove and (behind_a_token or int(mask.sum(1).min()) < remove):
        with pytest.raises(ValueError, match="after the last padding behind a token"):
            cache.crop(-remove)
        return
    cache.crop(-remove)
    end = ids.shape[1] - remove
    mask = torch.cat([mask[:, :end], torch.ones_like(more)], 1)
    other = compressed_cache(model, None, 2, 12, 3, backend="torch")
    want = feed(model, other, ids[:, :end], more, mask=mask)
    with torch.no_grad():
        got = model(more, attention_mask=mask, **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(got, want)


def test_a_mask_of_another_model_of_the_same_shape_warns(tmp_path):
    """The tokens would be other ones without a word."""
    model = tiny_model("llama")
    model.config._name_or_path = "org/small"
    mask = ChannelMask(torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool), {"model": "org/large"})
    mask.save(tmp_path / "mask.safetensors")
    for known in (mask, tmp_path / "mask.safetensors"):
        with pytest.warns(UserWarning, match="trained on org/large and is used on org/small"):
            compressed_cache(model, known)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("compressed", [True, False])
def test_another_batch_needs_a_reset(rows, compressed):
    model, (ids, _) = tiny_model("llama"), left_padded([9, 9], 3)
    cache = new_cache(model)
    if not compressed:
        cache.expect(30)
    feed(model, cache, ids)
    with pytest.raises(ValueError, match=f"a batch of 2, and a batch of {rows} came: call cache.reset") as error:
        feed(model, cache, torch.full((rows, 1), 3))
    assert one_line(error)


@pytest.mark.parametrize("chunk", [28, 20])
def test_drafts_may_come_with_an_announced_prompt(chunk):
    """What is drafted behind the prompt's end is no part of what was announced, and crop() takes it back."""
    model, ids = tiny_model("llama"), left_padded([28], 4)[0]
    announced, plain = new_cache(model, random_keep(3)), new_cache(model, random_keep(3))
    announced.expect(24)
    found = []
    for cache, pieces in ((announced, ids.split(chunk, 1)), (plain, [ids])):
        cache.activate_past_recording()
        feed(model, cache, *pieces)
        cache.crop(-3)
        assert cache.get_seq_length() == 25
        assert cache.layers[0].store is not None
        found.append(feed(model, cache, ids[:, :1]))
    torch.testing.assert_close(*found)
    announced.reset()
    announced.expect(24)
    reply = model.generate(ids[:, :24], **{CACHE: announced}, prompt_lookup_num_tokens=4, max_new_tokens=8, **GREEDY)
    plain.reset()
    want = model.generate(ids[:, :24], **{CACHE: plain}, prompt_lookup_num_tokens=4, max_new_tokens=8, **GREEDY)
    assert torch.equal(reply, want)


def test_decoding_before_all_that_was_announced_has_come_is_said_once():
    model, ids = tiny_model("llama"), left_padded([90], 4)[0]
    cache = new_cache(model)
    cache.expect(1000)
    feed(model, cache, ids)
    with pytest.warns(RuntimeWarning, match="while 910 tokens of the announced prompt are missing: until") as said:
        feed(model, cache, ids[:, :1], ids[:, :1])
    assert len(said) == 1
    cache.reset()
    cache.expect(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, cache, ids[:, :3], ids[:, 3:4], ids[:, 4:5])  # the last chunk is one token
    assert cache.layers[0].store is not None


def test_crop_goes_back_to_padding_inside_the_window():
    """A hole in the prompt, or in a later turn, keeps no token behind it from being taken back."""
    model, ids = tiny_model("llama"), left_padded([20, 20], 4)[0]
    hole = torch.ones(2, 16, dtype=torch.long)
    hole[1, 10] = 0
    turn = torch.cat([hole, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])], 1)
    cache = compressed_cache(model, None, 2, 30, 3, backend="torch")
    feed(model, cache, ids[:, :16], mask=hole)
    cache.crop(-4)
    got = feed(model, cache, ids[:, 12:16])
    with pytest.raises(ValueError, match="after the last padding behind a token"):
        cache.crop(-6)
    other = compressed_cache(model, None, 2, 30, 3, backend="torch")
    torch.testing.assert_close(got, feed(model, other, ids[:, :16], mask=hole))
    with torch.no_grad():
        want = [model(ids[:, 16:], attention_mask=turn, **{CACHE: one}).logits[:, -1] for one in (cache, other)]
    torch.testing.assert_close(*want)
    cache.crop(-3)
    torch.testing.assert_close(feed(model, cache, ids[:, 17:]), want[1])
    with pytest.raises(ValueError, match="after the last padding behind a token"):
        cache.crop(-4)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("again", ["prompt", "turn", "use_cache", "use_cache without padding"])
def test_ids_that_do_not_fit_what_the_cache_holds_are_refused(again, own):
    """A prompt without reset(), a turn without what came before, and use_cache=False all answered with other tokens."""
    model = tiny_model("llama")
    ids, mask = left_padded([20, 20 if "without" in again else 9], 1)
    cache = new_cache(model, random_keep(3))
    how = (cache.generate, (model,), {}) if own else (model.generate, (), {"past_key_values": cache})
    generate = functools.partial(how[0], *how[1], **how[2], **GREEDY, max_new_tokens=4)
    first = generate(input_ids=ids, attention_mask=mask)
    given = {"prompt": {"input_ids": ids, "attention_mask": mask}, "turn": {"input_ids": first[:, -5:]}}
    wrong = given.get(again, {"input_ids": torch.cat([first, ids], 1), "use_cache": False})
    with pytest.raises((ValueError, RuntimeError)) as error:
        generate(**wrong)
    if own or again != "turn":  # of a turn alone transformers makes no tokens at all
        assert "whole conversation" in str(error.value)
        assert "call cache.reset()" in str(error.value)
        assert one_line(error)
    cache.reset()
    assert torch.equal(generate(input_ids=ids, attention_mask=mask), first)


class Stopped(BaseException):
    """As Ctrl-C raises."""


@pytest.mark.filterwarnings("ignore:a pass of 3 tokens")
@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("where", ["update", "attend"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pass_that_broke_off_is_not_gone_on_from(layer, where, turn, monkeypatch):
    """Layers that lack tokens answered with other tokens; after reset() the cache is new."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, more = left_padded([20], 1)[0], left_padded([turn], 2)[0]
    cache = new_cache(model, keep)
    want = feed(model, cache, ids, more)
    cache.reset()
    feed(model, cache, ids)
    with monkeypatch.context() as patch:
        whole = getattr(CompressedLayer, where)

        def stop(self, *args, **kwargs):
            if self is cache.layers[layer]:
                raise Stopped
            return whole(self, *args, **kwargs)

        patch.setattr(CompressedLayer, where, stop)
        with pytest.raises(Stopped):
            feed(model, cache, more)
    if (layer, where) == (0, "update"):  # nothing has come
        assert torch.equal(feed(model, cache, more), want)
        return
    with pytest.raises(RuntimeError, match=r"the last pass broke off, .* call reset\(\)") as error:
        feed(model, cache, more)
    assert one_line(error)
    cache.reset()
    assert torch.equal(feed(model, cache, ids, more), want)


def test_tokens_wait_in_the_window_while_past_is_recorded():
    """Twelve tokens stay whole until crop() says how many were right; then those move that would have without."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, _ = left_padded([40], 3)
    cache, other, plain = (new_cache(model, keep) for _ in range(3))
    feed(model, cache, ids[:, :20])
    cache.activate_past_recording()
    feed(model, cache, ids[:, 20:32])
    assert cache.compressed[0].store.tail.length.max() == 0
    cache.crop(-4)
    assert cache.get_seq_length() == 28
    assert cache.compressed[0].store.start.tolist() == [20]
    for one in (other, plain):
        feed(model, one, ids[:, :20])
    other.activate_past_recording()
    feed(model, other, ids[:, 20:28])
    other.crop(0)
    torch.testing.assert_close(feed(model, cache, ids[:, 28:29]), feed(model, other, ids[:, 28:29]))
    feed(model, plain, *ids[:, 20:28].split(1, 1))
    assert plain.compressed[0].store.start.tolist() == [20]


@pytest.mark.parametrize("padded", [False, True])
def test_layers_with_their_own_sliding_window_are_left_alone(padded):
    """Mistral with a window of 16; models with full layers among sliding ones are test_families.py's."""
    ids, mask = left_padded([40, 21 if padded else 40], 8)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    mistral = tiny_model("mistral", sliding_window=16)
    mistral.set_attn_implementation("sdpa")
    want = mistral.generate(ids, **options)
    with pytest.warns(RuntimeWarning, match="nothing is compressed"):
        cache = compressed_cache(mistral, torch.zeros(LAYERS, HEADS, DIM, dtype=torch.bool), *SIZES)
    assert cache.compressed == []
    assert torch.equal(mistral.generate(ids, **{CACHE: cache}, **options), want)


def test_the_attention_it_switches_on_is_right_for_other_caches():
    model = tiny_model("llama")
    ids, mask = left_padded([30, 12], 9)
    model.set_attn_implementation("sdpa")
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    compressed_cache(model, random_keep(9))
    assert torch.equal(model.generate(ids, **options), want)
    assert torch.equal(model.generate(ids, **{CACHE: DynamicCache()}, prefill_chunk_size=7, **options), want)
    assert torch.equal(model.generate(ids, use_cache=False, **options), want)


def test_memory_is_what_the_tensors_hold_and_what_was_projected():
    model, keep = tiny_model("llama"), random_keep(10, empty=0.5)
    ids, _ = left_padded([300, 300], 10)
    sizes = Sizes(4, 32, 8)
    cache = compressed_cache(model, keep, 4, 32, 8)
    feed(model, cache, ids)
    memory = cache.memory()
    middle = 300 - 4 - 32
    assert memory.middle_k == 2 * 8 * middle * int(keep.sum())
    assert memory.middle_v == 2 * 8 * middle * DIM * int(keep.any(-1).sum())
    assert memory.window == 2 * 8 * 2 * LAYERS * HEADS * DIM * 32
    row = bytes_per_row(keep, 300, torch.float64, sizes)
    assert memory.total - memory.tables == 2 * row
    assert max_batch(keep, 300, 10 * row + 1, torch.float64, sizes) == 10
    assert bytes_per_row(keep, 3) == bytes_per_row(keep, 128 + 1024) < bytes_per_row(keep, 128 + 1024 + 1)


def test_memory_reads_in_megabytes_and_as_a_share_of_dense():
    memory = Memory(
        sink=500_000, window=3_100_000, middle_k=2_000_000, middle_v=5_900_000, tables=99_000, slack=1, dense=28_600_000
    )
    parts = "sink 0.5, window 3.1, middle K 2.0, middle V 5.9, tables 0.099, slack <0.001"
    assert str(memory) == f"11.6 MB, 41% of dense (28.6 MB): {parts}"
    assert str(memory + memory).startswith("23.2 MB, 41% of dense (57.2 MB): sink 1.0, ")
    assert str(Memory()) == "0.0 MB"
    assert str(Memory(other=2_000_000)) == "2.0 MB: other 2.0"
    assert "dense" not in asdict(memory)  # rows of results keep their parts
    assert memory.total == sum(asdict(memory).values())


def test_the_share_is_of_the_real_tokens_that_were_seen():
    model, lengths = tiny_model("llama"), [600, 400]
    ids, mask = left_padded(lengths, 10)
    cache = compressed_cache(model, random_keep(10, empty=0.5), 4, 32, 8)
    feed(model, cache, ids, mask=mask)
    feed(model, cache, ids[:, :1])
    dense = (sum(lengths) + 2) * 2 * LAYERS * HEADS * DIM * 8
    memory = cache.memory()
    assert f" MB, {memory.total / dense:.0%} of dense ({dense / 1e6:.1f} MB): sink 0" in str(memory)
    assert memory.total < dense
    cache.reset()
    assert cache.get_seq_length() == cache.memory().total == 0


@pytest.mark.parametrize(
    ("mask", "options", "line"),
    [
        (random_keep(1)[..., :4], {}, r"mask has shape \(2, 2, 4\), the model needs \(2, 2, 8\)"),
        ([Middle()], {}, r"mask has shape \(1, 2, 8\), the model needs \(2, 2, 8\)"),
        (torch.rand(LAYERS, HEADS, DIM), {}, "keep is torch.float32 .*: of scores, ChannelMask.from_scores"),
        (torch.full((LAYERS, HEADS, DIM), 2), {}, "keep is torch.int64 "),
        (None, {"window": -1}, "window=-1 must be greater than or equal to 0"),
        (None, {"flush": 2.5}, "flush=2.5 must be a valid integer"),
        (None, {"backend": "cuda"}, '"auto", "torch" or "triton"'),
    ],
)
def test_what_cannot_be_a_cache_is_refused(mask, options, line):
    with pytest.raises(ValueError, match=line) as error:
        compressed_cache(tiny_model("llama"), mask, **options)
    assert one_line(error)


def test_a_name_is_no_model_and_a_folder_no_cache(tmp_path):
    with pytest.raises(ValueError, match=r"model='org/name' is no model: give what AutoModelForCausalLM"):
        compressed_cache("org/name", None)
    with pytest.raises(FileNotFoundError, match=r"is a folder; give a file that CompressedCache.save\(\) wrote"):
        CompressedCache.load(tmp_path, tiny_model("llama"))


def test_calls_that_come_at_the_wrong_time_are_refused():
    model, ids = tiny_model("llama"), left_padded([9], 12)[0]
    cache = new_cache(model, random_keep(12))
    for value in (0, 2.5, "32", True):
        with pytest.raises(ValueError, match="give the number of tokens in the whole prompt, at least 1"):
            cache.expect(value)
    feed(model, cache, ids, ids[:, :1])
    with pytest.raises(RuntimeError, match="must come before the prompt"):
        cache.expect(5)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)
    feed(model, cache, *ids[:, :2].split(1, 1))  # the window is full: three tokens move
    with pytest.raises(ValueError, match="at most 0 came after"):
        cache.crop(-1)
    cache.reset()
    cache.expect(4)
    with pytest.raises(ValueError, match="announced fewer tokens"):
        feed(model, cache, ids)
    with pytest.raises(ValueError, match="2-D padding mask"):
        cache.compressed[0].attend(torch.zeros(1, 4, 1, DIM), torch.zeros(1, 1, 1, 1))


def test_a_prompt_beyond_the_positions_is_refused_and_a_reply_is_not():
    model = tiny_model("llama", max_position_embeddings=32)
    ids, cache = left_padded([40], 12)[0], new_cache(tiny_model("llama", max_position_embeddings=32), random_keep(12))
    said = "40 tokens: more than the model's max_position_embeddings=32; shorten the prompt"
    for call in (
        lambda: cache.generate(model, ids, max_new_tokens=2),
        lambda: model.generate(ids, past_key_values=cache, max_new_tokens=2),
        lambda: model(ids, past_key_values=cache),
        lambda: model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache),
    ):
        with pytest.raises(ValueError, match=said) as error:
            call()
        assert one_line(error)
        assert cache.held == 0
    assert cache.generate(model, ids[:, :31], max_new_tokens=4, **GREEDY).shape == (1, 35)
    with pytest.raises(ValueError, match="2 tokens after the 34 that are held: more than the model's max_position"):
        model(ids[:, :2], past_key_values=cache)


@torch.no_grad()
def test_a_drafted_reply_may_go_on_beyond_the_positions():
    model = tiny_model("llama", max_position_embeddings=64)
    ids, keep = left_padded([56], 12)[0], random_keep(12)
    plain = model.generate(ids, past_key_values=new_cache(model, keep), max_new_tokens=16, **GREEDY)
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16, **GREEDY}
    assert torch.equal(model.generate(ids, past_key_values=new_cache(model, keep), **drafts), plain)


@pytest.mark.filterwarnings("ignore:no layer of mistral")
@pytest.mark.filterwarnings("ignore:a pass of")
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "qwen2_sliding"])
def test_a_later_mask_of_four_dimensions_is_one_line(family):
    model = tiny_model(family, sliding_window=64) if family == "mistral" else build(family)
    ids = left_padded([80], 12)[0] % 61
    cache = new_cache(model)
    model(ids, past_key_values=cache)
    mask = torch.zeros(1, 1, 2, 82)
    with pytest.raises(ValueError, match="2-D padding mask") as error:
        model(ids[:, :2], attention_mask=mask, past_key_values=cache)
    assert one_line(error)


def test_sink_and_window_are_those_that_the_mask_was_trained_with(tmp_path):
    path, model = tmp_path / "mask.safetensors", tiny_model("llama")
    mask = ChannelMask(random_keep(15), {"sink": 3, "window": 40})
    mask.save(path)
    assert torch.equal(
        torch.stack([layer.middle.channels for layer in compressed_cache(model, path).layers]), mask.keep
    )
    for options, sizes in (({}, (3, 40, 32)), ({"window": 7, "flush": 5}, (3, 7, 5)), ({"sink": 0}, (0, 40, 32))):
        assert {compressed_cache(model, one, **options).compressed[0].sizes for one in (mask, path)} == {Sizes(*sizes)}
    with pytest.raises(ValueError, match="window='long' is not what training writes"):
        compressed_cache(model, ChannelMask(random_keep(15), {"window": "long"}))


@pytest.mark.parametrize("gpu", [False, True])
def test_plain_pytorch_says_why_once_where_there_is_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    model, ids = tiny_model("llama"), left_padded([12], 13)[0]

    def decode(backend="auto"):
        feed(model, compressed_cache(model, random_keep(13), *SIZES, backend=backend), ids, ids[:, :1])

    backend._warn.cache_clear()
    if gpu:
        with pytest.warns(RuntimeWarning, match="runs in plain PyTorch: "):
            decode()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode()
    with pytest.raises(RuntimeError, match='backend="triton" cannot run: '):
        decode("triton")


def test_no_more_than_a_page_is_spare_before_there_is_a_middle():
    model = tiny_model("llama")
    cache = compressed_cache(model, ChannelMask(random_keep(0)), 8, 1024, 32, "torch")
    ids = torch.randint(2, 80, (1, 265), generator=torch.Generator().manual_seed(0))
    model(ids, **{CACHE: cache})
    token = 2 * 2 * 2 * 8 * 8  # K and V, layers, heads, channels, fp64
    for length in range(265, 400):
        held = cache.memory()
        assert (held.middle_k, held.middle_v) == (0, 0)
        assert held.sink + held.window == length * token
        assert held.slack < PAGE * token
        model(ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("lengths", [[40, 7], [300, 200]], ids=str)
def test_tokens_are_those_of_a_ring_that_is_whole_from_the_start(lengths, monkeypatch):
    model, logits = tiny_model("llama"), []
    width = max(lengths)
    ids = torch.randint(2, 80, (2, width), generator=torch.Generator().manual_seed(1))
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(Store, "_slots", lambda self, held: max(self.sizes.ring, -(-held // PAGE) * PAGE))
        cache = compressed_cache(model, ChannelMask(random_keep(0)), 8, 250, 32, "torch")
        mask, found = real, []
        found.append(model(ids, attention_mask=mask.long(), **{CACHE: cache}).logits[:, -1])
        for step in range(150):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            token = ids[:, step % width, None]
            found.append(model(token, attention_mask=mask.long(), **{CACHE: cache}).logits[:, -1])
        logits.append(torch.stack(found).detach().numpy())
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-12)  # in another order of the slots
