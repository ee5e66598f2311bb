"""A cache whose prompt has no middle yet takes about what the dense one takes, and answers as one with all its room."""

import numpy as np
import pytest
import torch

from leank.eval.cache import compressed_cache
from leank.eval.cache.storage.segment import PAGE
from leank.mask import ChannelMask
from tests.helpers.cache_oracle import random_keep, tiny_model


def test_no_more_than_a_page_is_spare_before_there_is_a_middle():
    model = tiny_model("llama")
    cache = compressed_cache(model, ChannelMask(random_keep(0)), 8, 1024, 32, "torch")
    ids = torch.randint(2, 80, (1, 265), generator=torch.Generator().manual_seed(0))
    model(ids, past_key_values=cache)
    token = 2 * 2 * 2 * 8 * 8  # K and V, layers, heads, channels, fp64
    for length in range(265, 400):
        held = cache.memory()
        assert (held.middle_k, held.middle_v) == (0, 0)
        assert held.sink + held.window == length * token
        assert held.slack < PAGE * token
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("lengths", [[5, 5], [40, 7], [300, 200]], ids=str)
def test_tokens_are_those_of_a_ring_that_is_whole_from_the_start(lengths, monkeypatch):
    from leank.eval.cache.storage.store import Store

    model, logits = tiny_model("llama"), []
    width = max(lengths)
    ids = torch.randint(2, 80, (2, width), generator=torch.Generator().manual_seed(1))
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(Store, "_slots", lambda self, held: max(self.sizes.ring, -(-held // PAGE) * PAGE))
        cache = compressed_cache(model, ChannelMask(random_keep(0)), 8, 250, 32, "torch")
        mask, found = real, []
        found.append(model(ids, attention_mask=mask.long(), past_key_values=cache).logits[:, -1])
        for step in range(150):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            token = ids[:, step % width, None]
            found.append(model(token, attention_mask=mask.long(), past_key_values=cache).logits[:, -1])
        logits.append(torch.stack(found).detach().numpy())
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-12)  # in another order of the slots
