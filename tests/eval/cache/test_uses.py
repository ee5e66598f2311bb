"""Unusual uses of a compressed cache: what the user hears, and what must come out the same."""

import functools
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.mask import ChannelMask
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, random_keep, run, tiny_model
from tests.helpers.cache_uses import GREEDY, SIZES, feed, new_cache
from tests.helpers.refusals import one_line


@pytest.mark.parametrize("after", ["reset", "second turn"])
def test_recording_ends_after_assisted_decoding(after):
    """What follows prompt lookup is compressed as it is after plain greedy decoding."""
    model, keep = tiny_model("llama"), random_keep(3, empty=0)
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache, plain = new_cache(model, keep), new_cache(model, keep)
    reply = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, max_new_tokens=12, **GREEDY)
    if after == "reset":
        cache.reset()
        got, want = (model.generate(ids, past_key_values=c, max_new_tokens=20, **GREEDY) for c in (cache, plain))
        assert torch.equal(got, want)
    else:
        more = torch.cat([reply, left_padded([5], 6)[0]], 1)
        model.generate(more, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert not any(layer.record_past for layer in cache.layers)
    for layer in cache.layers:
        assert SIZES[1] <= layer.store.seen - layer.store.start < SIZES[1] + SIZES[2]


def test_recording_ends_in_sliding_layers_too():
    model = tiny_model("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache = new_cache(model)
    reply = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, max_new_tokens=12, **GREEDY)
    assert torch.equal(reply, model.generate(ids, max_new_tokens=12, **GREEDY))
    more = torch.cat([reply, left_padded([5], 6)[0]], 1)
    got = model.generate(more, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert torch.equal(got, model.generate(more, max_new_tokens=20, **GREEDY))
    assert cache.layers[1].keys.shape[2] == 15
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=12, **GREEDY), reply)


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
        model.generate(torch.cat([turn, ids], 1), past_key_values=cache, max_new_tokens=2, **GREEDY)
        lookup = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 5, **GREEDY}
        model.generate(ids.repeat(1, 2), past_key_values=new_cache(model, keep), **lookup)


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
    deeper.set_attn_implementation(ATTENTION)
    with pytest.raises(ValueError, match="made for a model of 2 layers, and layer 2 asks for it") as error:
        feed(deeper, cache, ids)
    assert one_line(error)
    wider = tiny_model("qwen2", num_key_value_heads=4)
    wider.set_attn_implementation(ATTENTION)
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
        out = model.generate(ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options)
        model.set_attn_implementation("sdpa")
        want = feed(model, DynamicCache(), ids, mask=mask)
    assert {t.dtype for n, t in cache.layers[0].store.tensors().items() if n.endswith(("_k", "_v"))} == {torch.bfloat16}
    torch.testing.assert_close(out.logits[0].float(), want.float(), rtol=0.05, atol=0.2)
    layer = new_cache(model).layers[0]
    k, v = torch.randn(2, 1, HEADS, 20, DIM)
    k, v = (k, v.bfloat16()) if wide == "keys" else (k.bfloat16(), v)
    layer.seal(k, v)
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
        got = model(more, attention_mask=mask, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("mask", "line"),
    [
        (torch.rand(LAYERS, HEADS, DIM), "keep is torch.float32 .*: of scores, ChannelMask.from_scores"),
        (torch.full((LAYERS, HEADS, DIM), 2), "keep is torch.int64 "),
        ([Middle()], r"mask has shape \(1, 2, 8\), the model needs \(2, 2, 8\)"),
    ],
)
def test_what_is_no_mask_is_refused(mask, line):
    with pytest.raises(ValueError, match=line) as error:
        compressed_cache(tiny_model("llama"), mask)
    assert one_line(error)


def test_a_mask_of_another_model_of_the_same_shape_warns(tmp_path):
    """The tokens would be other ones without a word."""
    model = tiny_model("llama")
    model.config._name_or_path = "org/small"
    mask = ChannelMask(torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool), {"model": "org/large"})
    mask.save(tmp_path / "mask.safetensors")
    for known in (mask, tmp_path / "mask.safetensors"):
        with pytest.warns(UserWarning, match="trained on org/large and is used on org/small"):
            compressed_cache(model, known)


def test_pickling_says_what_to_do_instead():
    with pytest.raises(TypeError, match=r"call save\(\), and CompressedCache\.load\(\)"):
        pickle.dumps(new_cache(tiny_model("llama")))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sealed", [True, False])
def test_another_batch_needs_a_reset(rows, sealed):
    model, (ids, _) = tiny_model("llama"), left_padded([9, 9], 3)
    cache = new_cache(model)
    if not sealed:
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
    reply = model.generate(
        ids[:, :24], past_key_values=announced, prompt_lookup_num_tokens=4, max_new_tokens=8, **GREEDY
    )
    plain.reset()
    want = model.generate(ids[:, :24], past_key_values=plain, prompt_lookup_num_tokens=4, max_new_tokens=8, **GREEDY)
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
        want = [model(ids[:, 16:], attention_mask=turn, past_key_values=one).logits[:, -1] for one in (cache, other)]
    torch.testing.assert_close(*want)
    cache.crop(-3)
    torch.testing.assert_close(feed(model, cache, ids[:, 17:]), want[1])
    with pytest.raises(ValueError, match="after the last padding behind a token"):
        cache.crop(-4)


@pytest.mark.parametrize("value", [0, -1, 2.5, "32", True])
def test_numbers_of_tokens_are_whole(value):
    model = tiny_model("llama")
    if value not in (0, -1):
        for name in ("sink", "window", "flush"):
            with pytest.raises(ValueError, match=f"{name}={value!r} must be a valid integer"):
                compressed_cache(model, None, **{name: value})
    with pytest.raises(ValueError, match=r"give the number of tokens in the whole prompt, at least 1"):
        new_cache(model).expect(value)


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
