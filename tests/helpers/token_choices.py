"""Prompts of which everything is observed, and what a choice of tokens keeps of them, for tests."""

import torch

from leank.eval.inference.prefill import prefill
from leank.eval.methods.tokens.duo_attention import DuoAttention
from tests.helpers.cache_oracle import HEADS, left_padded, tiny_model


def observed(lengths, seed=0, family="llama", model=None, **changes):
    """(model, a dense pass over prompts of these lengths) with all that the methods here may want to see."""
    model = model or tiny_model(family, **changes)
    ids, mask = left_padded(lengths, seed)
    return model, prefill(model, ids % model.config.vocab_size, mask.bool(), 0, obs_queries=8, column_sums=True)


def alone(model, lengths, row, seed=0):
    """As `observed`, of one of the prompts without padding."""
    ids, _ = left_padded(lengths, seed)
    return prefill(model, ids[row : row + 1, -lengths[row] :], None, 0, obs_queries=8, column_sums=True)


def attention(queries, keys):
    """Softmax rows [Hq, n, T] of the last n queries, each over what it sees."""
    count, length, group = queries.shape[1], keys.shape[1], queries.shape[0] // keys.shape[0]
    out = torch.zeros(queries.shape[0], count, length, dtype=torch.float64)
    for head in range(queries.shape[0]):
        for t in range(count):
            seen = length - count + t + 1
            logits = keys[head // group, :seen] @ queries[head, t] / keys.shape[-1] ** 0.5
            out[head, t, :seen] = logits.softmax(0)
    return out


def kept_of(keep, row, length):
    """Kept tokens of each KV head of a padded row, numbered without its padding; None = all."""
    if keep is None:
        return [list(range(length))] * HEADS
    assert not keep[row, :, : keep.shape[2] - length].any()
    return [head[keep.shape[2] - length :].nonzero()[:, 0].tolist() for head in keep[row]]


def duo(folder, gates, ratio=0.5):
    """DuoAttention with these gates [L, H], written to a file in `folder` as the authors do."""
    path = folder / "full_attention_heads.tsv"
    path.write_text("\n".join("\t".join(f"{gate:.18e}" for gate in row) for row in gates))
    return DuoAttention(str(path), ratio)
