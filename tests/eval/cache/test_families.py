"""What a cache shows of its state, and every family of models with it."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import StaticCache

from leank.eval.cache import CompressedLayer, compressed_cache
from leank.eval.inference.models import windows_of
from leank.shape import check_decoder
from tests import ROOT
from tests.helpers import walk
from tests.helpers.families import REFUSED, RIGHT, UNTRAINED, build, trained
from tests.helpers.walk import PROMPT, SIZES, STEPS, close, config_of, prompts, teach


@pytest.fixture(scope="module")
def model():
    return build("qwen3_next")  # a layer of linear attention, then one of full attention


def test_a_cache_serves_batches_of_several_sizes(model):
    ids, mask = prompts(2)
    cache = compressed_cache(model, None, *SIZES)
    want = teach(model, cache, ids, mask)
    cache.reset()
    teach(model, cache, ids[:1], mask[:1])
    cache.reset()
    close(teach(model, cache, ids, mask), want)


def test_rows_are_repeated_and_dropped_with_their_states(model):
    ids, mask = prompts(2)
    cache = compressed_cache(model, None, *SIZES)
    teach(model, cache, ids[:, :-1], mask[:, :-1], steps=1)
    many = cache.repeat(2)
    few = cache.repeat(1)
    few.batch_select_indices(torch.tensor([1]))
    position = mask.sum(-1, keepdim=True) - 1

    def last(cache, rows):
        with torch.no_grad():
            return model(
                ids[rows, -1:], attention_mask=mask[rows], position_ids=position[rows], past_key_values=cache
            ).logits

    want = last(cache, [0, 1])
    close(last(many, [0, 0, 1, 1]), want.repeat_interleave(2, 0))
    close(last(few, [1]), want[1:])


def test_states_count_as_memory(model):
    ids, _ = prompts(1)
    cache = compressed_cache(model, None, *SIZES)
    teach(model, cache, ids)
    assert cache.memory().other == sum(state.nbytes for state in cache.layers[0].states) > 0
    assert windows_of(model.config) == [0, None]


def test_what_a_state_cannot_do_is_refused(model, tmp_path):
    cache = compressed_cache(model, None, *SIZES)
    teach(model, cache, prompts(1)[0])
    for take_back in (cache.activate_past_recording, lambda: cache.crop(-1)):
        with pytest.raises(ValueError, match="linear attention of this model cannot"):
            take_back()
    with pytest.raises(ValueError, match="linear attention cannot be saved"):
        cache.save(tmp_path / "cache.safetensors")


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_pruned_is_the_dense_model(name):
    """Eager attention, written in the model's own file, against the cache and against other caches after the switch."""
    model = build(name)
    want = walk.dense(model)
    walk.check_nothing_pruned(model, want)
    assert any(isinstance(layer, CompressedLayer) for layer in compressed_cache(model, None).layers)
    static = StaticCache(config=config_of(model), max_cache_len=PROMPT + STEPS + 9)
    close(teach(model, static, prompts(1)[0]), want)


@pytest.mark.parametrize("name", RIGHT)
def test_a_pruned_mask_is_the_oracle(name):
    walk.check_a_mask(build(name))


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_at_once_are_tokens_one_by_one(name):
    walk.check_a_turn(build(name))


@pytest.mark.parametrize("name", RIGHT)
def test_generate_gives_the_dense_tokens(name):
    walk.check_generate(build(name))


PAGE = (ROOT / "docs/use/families.md").read_text(encoding="utf-8")


@pytest.mark.skipif(f"transformers {transformers.__version__}," not in PAGE, reason="the page is of another release")
@pytest.mark.parametrize(
    "kind", ["apertus", "cohere_compass_text", "diffllama", "lfm2", "nemotron_h", "qwen3_5", "zaya"]
)
def test_the_walk_finds_what_the_page_says(kind):
    """A handful; the next test walks over all."""
    found = walk.walk(kind)
    (section,) = [text for text in PAGE.split("\n## ") if text.startswith(walk.part(found))]
    assert any(kind in line and walk.reason(found) in line for line in section.splitlines()), found


@pytest.mark.slow
def test_no_decoder_of_transformers_fails():
    assert [(kind, found) for kind in walk.CLASSES if walk.part(found := walk.walk(kind)) == "Fails"] == []
    if f"transformers {transformers.__version__}," in PAGE:
        assert walk.page() in PAGE, "run make families"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name):
    model, line = build(name), REFUSED[name]
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=line) as error:
        compressed_cache(model, None, *SIZES)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", UNTRAINED)
def test_training_refuses_what_it_does_not_know(name):
    with pytest.raises(ValueError, match=UNTRAINED[name]) as error:
        walk.hidden_in_training(build(name), prompts(1)[0][:, :20])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", trained())
def test_training_sees_the_model(name):
    walk.check_hidden_states(build(name))


@pytest.mark.parametrize(("config", "text"), [("LlavaConfig", "llama"), ("Qwen2_5_VLConfig", "qwen2_5_vl_text")])
def test_training_wants_the_language_model_alone(config, text):
    model = SimpleNamespace(config=getattr(transformers, config)())
    with pytest.raises(ValueError, match=rf"takes more than text; load its language model \({text}\) alone"):
        check_decoder(model)
