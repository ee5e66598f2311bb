"""Models with linear attention: their attention layers are compressed, and the states of the others stay right."""

import pytest
import torch

from leank.eval.cache import compressed_cache
from leank.eval.inference.models import windows_of
from tests.helpers.families import build
from tests.helpers.walk import SIZES, close, prompts, teach


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
