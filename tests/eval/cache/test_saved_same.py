"""What a saved cache says of its model, its mask and its tokens: equal for equal ones, and for no others."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leank.eval.cache import CompressedCache, compressed_cache
from leank.eval.cache.saved import model_digest
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Extent
from tests.helpers.cache_oracle import left_padded, tiny_model


def test_what_tells_models_apart():
    """The type, and of every weight the name, shape and dtype, and numbers from its first to its last."""
    config, weight = tiny_model("llama").config, torch.arange(200.0)
    last = weight.clone()
    last[-1] += 1
    made = [
        (config, {"a": weight}), (tiny_model("qwen2").config, {"a": weight}), (config, {"b": weight}),
        (config, {"a": weight.view(10, 20)}), (config, {"a": weight.double()}), (config, {"a": last}),
    ]  # fmt: skip
    models = [SimpleNamespace(config=one, named_parameters=weights.items) for one, weights in made]
    assert len({model_digest(model) for model in models}) == len(made)


def test_a_mask_that_keeps_every_channel_is_no_mask(tmp_path):
    model, everything = tiny_model("llama"), torch.ones(2, 2, 8, dtype=torch.bool)
    cache = compressed_cache(model, None, 2, 6, 4)
    with torch.no_grad():
        model(left_padded([20], 1)[0], past_key_values=cache)
    cache.save(tmp_path / "c")
    CompressedCache.load(tmp_path / "c", model, everything)
    everything[1, 0, 3] = False
    with pytest.raises(ValueError, match="was made with another mask"):
        CompressedCache.load(tmp_path / "c", model, everything)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 128])
@pytest.mark.parametrize("form", ["whole", "pruned values", "4 bits"])
def test_nothing_of_a_file_comes_from_room_that_is_left(tokens, form):
    k, v = torch.randn(2, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(tokens))
    keep, found = torch.arange(32) < torch.tensor([[8], [20]]), []
    middle = Middle(keep, ~keep if form == "pruned values" else None, bits=Packing(4, 32) if form == "4 bits" else None)
    channels, values = (None if t is None else KeptChannels.of(t, k) for t in (middle.channels, middle.values))
    for left in (3, 200):
        segment = middle.segment(Extent(channels, np.full((1, 2), 128), 32, k.dtype, values))
        segment.k.fill_(left)
        segment.v.fill_(left)
        segment.append(np.arange(1), k, v)
        found.append(segment.without_spare())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.any() == (tokens > 0)
