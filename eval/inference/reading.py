"""Reading given tokens through a cache as decoding would: the hidden state after each of them.

Token by token is the definition (`read_one_by_one`). Between two moves out of the window a layer that does not evict
holds the same for every token, so `read` gives such a cache all tokens up to the next move at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.cache import CompressedLayer
from eval.inference.prefill import positions_of

AT_ONCE = 256  # tokens that a cache without a window of its own reads at a time


def at_once(cache: Cache) -> int:
    """Return how many tokens the cache can take in one call with the result of one by one.

    A layer that evicts while decoding takes one, for each step may change what the next one sees.
    """
    stores = [layer.store for layer in cache.layers if isinstance(layer, CompressedLayer) and layer.store is not None]
    return max(1, min([AT_ONCE, *(store.quiet for store in stores)]))


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Feed ids [B, n] to a cache, as many at a time as give what one by one gives.

    real: bool [B, all columns so far and these] or None: False marks padding; None is no padding.

    Returns the decoder's hidden states after each token, [B, n, hidden].
    """
    found, start = [], 0
    while start < ids.shape[1]:
        stop = min(ids.shape[1], start + at_once(cache))
        found.append(states(model, cache, ids[:, start:stop], _until(real, ids, stop)))
        start = stop
    return torch.cat(found, 1)


@torch.no_grad()
def read_one_by_one(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Do what `read` does, token by token: the slow, obvious form that tests compare `read` with."""
    steps = [states(model, cache, ids[:, i : i + 1], _until(real, ids, i + 1)) for i in range(ids.shape[1])]
    return torch.cat(steps, 1)


@torch.no_grad()
def states(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Feed ids [B, n] to a cache in one call; the other parameters and the result are those of `read`."""
    out = model.base_model(
        input_ids=ids,
        attention_mask=real,
        position_ids=positions_of(ids, real, cache.get_seq_length()),
        past_key_values=cache,
        use_cache=True,
    )
    return out.last_hidden_state


def _until(real: Tensor | None, ids: Tensor, stop: int) -> Tensor | None:
    """Cut `real` behind the first `stop` of the tokens ids."""
    return None if real is None else real[:, : real.shape[1] - ids.shape[1] + stop]
