"""Reading given tokens through a cache as decoding would: the hidden state after each of them.

Token by token is the definition (`read_one_by_one`). `read` gives the cache many tokens at once, and a compressed layer
takes them in pieces that find what each would find alone (`eval.cache.storage.arrival`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leank.eval.inference.prefill import positions_of

AT_ONCE = 256  # tokens of a call; the limit bounds the hidden states and scores held


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None) -> Tensor:
    """Feed ids [B, n] to a cache, with the result of one by one.

    real: bool [B, all columns so far and these] or None: False marks padding; None is no padding.

    Returns the decoder's hidden states after each token, [B, n, hidden].
    """
    starts = range(0, ids.shape[1], AT_ONCE)
    found = [
        states(model, cache, part, _until(real, ids, start + part.shape[1]))
        for start, part in zip(starts, ids.split(AT_ONCE, 1), strict=True)
    ]
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
