"""Tiny random models of many families: with every channel kept the cache is the dense model, with a pruned mask it is
the oracle; or one line says why the model is refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, StaticCache

from leank.eval.cache import CompressedLayer, compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.shape import check_decoder, kv_shape
from leank_train.forward.hook import run_decoder
from tests import ROOT
from tests.helpers.cache_oracle import oracle_cache
from tests.helpers.families import REFUSED, RIGHT, UNTRAINED, build, table, trained

SIZES = (4, 12, 4)  # sink, window, flush
PROMPT, STEPS = 70, 6  # the prompt is longer than the sliding windows


def teach(model, cache, ids, mask=None, steps=STEPS):
    """Logits after the prompt and after each of `steps` tokens that are fed in, [steps + 1, B, vocabulary]."""
    cut, found = ids.shape[1] - steps, []
    position = (torch.ones_like(ids) if mask is None else mask).cumsum(-1).sub(1).clamp(min=0)
    for start, stop in [(0, cut), *((t, t + 1) for t in range(cut, ids.shape[1]))]:
        with torch.no_grad():
            out = model(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=position[:, start:stop],
                past_key_values=cache,
            )
        found.append(out.logits[:, -1])
    return torch.stack(found)


def prompts(rows):
    ids = torch.randint(2, 61, (rows, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :30] = 0
    return ids, mask


def close(got, want, tolerance=1e-5):  # norms and the eager softmax of many models round to float32
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def config_of(model):
    return model.config.get_text_config(decoder=True)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_pruned_is_the_dense_model(name):
    """Eager attention, written in the model's own file, against the cache and against other caches after the switch."""
    model, (ids, _) = build(name), prompts(1)
    model.set_attn_implementation("eager")
    want = teach(model, DynamicCache(config=config_of(model)), ids)
    cache = compressed_cache(model, None, *SIZES)
    assert any(isinstance(layer, CompressedLayer) for layer in cache.layers)
    close(teach(model, cache, ids), want)
    close(teach(model, DynamicCache(config=config_of(model)), ids), want)
    close(teach(model, StaticCache(config=config_of(model), max_cache_len=PROMPT + STEPS + 9), ids), want)


@pytest.mark.parametrize("name", RIGHT)
def test_a_pruned_mask_is_the_oracle(name):
    model, (ids, mask) = build(name), prompts(2)
    shape = kv_shape(config_of(model))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[:, 0] &= torch.arange(shape[2]) < 3
    cache, oracle = compressed_cache(model, keep, *SIZES), oracle_cache(keep, *SIZES)
    for index, layer in enumerate(DynamicCache(config=config_of(model)).layers):
        if not isinstance(cache.layers[index], CompressedLayer):
            oracle.layers[index] = layer
    got = teach(model, cache, ids, mask)
    model.set_attn_implementation("oracle")
    close(got, teach(model, oracle, ids, mask))
    model.set_attn_implementation(ATTENTION)
    whole = teach(model, compressed_cache(model, None, *SIZES), ids, mask)
    assert (got - whole)[1:].abs().max() > 1e-3  # the mask matters


@pytest.mark.parametrize("name", RIGHT)
def test_generate_gives_the_dense_tokens(name):
    """generate() and its bookkeeping, on a left-padded batch, with nothing pruned."""
    model, (ids, mask) = build(name), prompts(2)
    options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    cache = compressed_cache(model, None, *SIZES)
    got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(ids, past_key_values=DynamicCache(config=config_of(model)), **options))


def test_the_page_of_families_is_what_is_tested():
    assert table() in (ROOT / "docs" / "families.md").read_text(encoding="utf-8"), "run make families"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name):
    model, line = build(name), REFUSED[name]
    before = model.config._attn_implementation
    mask = torch.ones(2, 2, 16, dtype=torch.bool)
    with pytest.raises(ValueError, match=line) as error:
        compressed_cache(model, mask, *SIZES)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before


class Causal:
    """What a training pass does in its layers when nothing is scaled."""

    longest = 20

    def attend(self, layer, q, k, v, scale):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def hidden_in_training(model, ids):
    check_decoder(model)
    with torch.no_grad():
        return run_decoder(model, ids, torch.arange(ids.shape[1])[None], Causal())


@pytest.mark.parametrize("name", UNTRAINED)
def test_training_refuses_what_it_does_not_know(name):
    with pytest.raises(ValueError, match=UNTRAINED[name]) as error:
        hidden_in_training(build(name), prompts(1)[0][:, :20])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", trained())
def test_training_sees_the_model(name):
    """Shorter than its sliding windows every other family has the hidden states of eager attention."""
    model, ids = build(name), prompts(1)[0][:, :20]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.base_model(ids).last_hidden_state
    close(hidden_in_training(model, ids), want)


@pytest.mark.parametrize(("config", "text"), [("LlavaConfig", "llama"), ("Qwen2_5_VLConfig", "qwen2_5_vl_text")])
def test_training_wants_the_language_model_alone(config, text):
    model = SimpleNamespace(config=getattr(transformers, config)())
    with pytest.raises(ValueError, match=rf"takes more than text; load its language model \({text}\) alone"):
        check_decoder(model)
