"""`eval.cache.naive` as a cache of a model: the oracle of compressed caches, with which they share no other code.

Tiny random models of four families to run it on.
"""

import functools

import torch
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

from leank.eval.cache.naive import Head, Rules
from leank.versions import CACHE
from tests import conftest
from tests.conftest import ARCHITECTURES as FAMILIES
from tests.oracles.attention import attention, causal

LAYERS, HEADS, DIM, VOCAB = 2, 2, 8, 89
SEEDS = st.integers(0, 2**20)


@functools.cache
def tiny_model(family: str, dtype=torch.float64, **changes):
    """A random model whose attention is peaked enough that pruning changes its tokens."""
    settings = {
        "vocab_size": VOCAB, "intermediate_size": 40, "initializer_range": 0.4, "max_position_embeddings": 8192,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    return conftest.tiny_model(family, sorted(FAMILIES).index(family), **{**settings, **changes}).to(dtype)


class OracleLayer(DynamicLayer):
    """One naive head per row and KV head, beside dense keys and values of all columns.

    tokens: bool [B, H, T], the prompt's columns that stay in the middle; joins: bool [H], heads whose middle takes
    tokens that leave the window; values: bool [H, D], kept channels of V; None = all. center: [H, D], what pruned
    channels of K are read as, 0 by default. rounded: (head, k, v) -> k, v, each [n, D], the tokens of one head that
    enter the middle together.
    """

    def __init__(
        self, keep, sink, window, flush, tokens=None, joins=None, values=None, center=None, rounded=None, expected=0,
        absolute=False,
    ):  # fmt: skip
        super().__init__()
        self.tokens, self.expected, self.heads = tokens, expected, None
        self.rules = [
            Rules(
                sink, window, flush, keep[h],
                values=None if values is None else values[h],
                center=None if center is None else center[h],
                joins=joins is None or bool(joins[h]),
                bits=rounded and functools.partial(rounded, h),
                absolute=absolute,
            )
            for h in range(len(keep))
        ]  # fmt: skip

    def update(self, key_states, value_states, *args, **kwargs):
        super().update(key_states, value_states)
        return self, value_states

    def attend(self, q, mask, scaling, softcap=None, s_aux=None):
        """The columns come one by one: each query finds the window as it is when its token comes.

        Until the prompt is there, a naive head attends to all that came before; here by whole matrices.
        """
        new, length = q.shape[2], self.keys.shape[2]
        real = torch.ones(len(q), length, dtype=torch.bool) if mask is None else mask[:, :length].bool()
        if self.heads is None:
            self.heads = [[Head(rules) for rules in self.rules] for _ in q]
        dense = not self.heads[0][0].compressed
        if dense:
            out = attention(q, self.keys, self.values, scaling, causal(new, length, real), softcap, s_aux)
        else:
            out = torch.zeros_like(q)
        group = q.shape[1] // len(self.rules)
        for b, row in enumerate(self.heads):
            for h, head in enumerate(row):
                mine = slice(h * group, (h + 1) * group)
                for query in range(new):
                    column = length - new + query
                    if not real[b, column]:
                        continue
                    head.append(self.keys[b, h, column], self.values[b, h, column])
                    if not dense:
                        sinks = None if s_aux is None else s_aux[mine]
                        out[b, mine, query] = head.attend(q[b, mine, query], scaling, softcap, sinks)
                        head.flush()
                if not head.compressed and length >= self.expected:
                    head.compress(None if self.tokens is None else self.tokens[b, h][real[b]])
        return out.transpose(1, 2).contiguous()


def oracle_cache(keep, sink, window, flush, expected=0, **by_layer):
    """by_layer: of each layer tokens, joins, values, center; see OracleLayer."""
    return Cache(
        layers=[
            OracleLayer(k, sink, window, flush, **{name: each[i] for name, each in by_layer.items()}, expected=expected)
            for i, k in enumerate(keep)
        ]
    )


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    if isinstance(key, torch.Tensor):
        return _sliding(query, key, value, attention_mask, scaling, softcap, s_aux), None
    beyond = {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
    return key.attend(query, attention_mask, scaling, **beyond), None


def _sliding(query, key, value, seen, scaling, softcap, s_aux):
    """A layer that is not compressed; seen [B, 1, Q, T] bool."""
    if seen is None or seen.ndim == 2:  # nothing has left the window yet
        above = causal(query.shape[2], key.shape[2])
        seen = above if seen is None else above & seen[:, None, None, : key.shape[2]].bool()
    return attention(query, key, value, scaling, seen, softcap, s_aux).transpose(1, 2).contiguous()


def _mask(*args, attention_mask=None, mask_function=causal_mask_function, **kwargs):
    if mask_function is causal_mask_function and not kwargs.get("kv_offset"):
        return attention_mask
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, mask_function=mask_function, **kwargs)


AttentionInterface.register("oracle", _attention)
AttentionMaskInterface.register("oracle", _mask)


def run(model, cache, ids, mask, new_tokens, attention, **options):
    """generate() with the cache under the named attention: (tokens, logits of each step or None)."""
    model.set_attn_implementation(attention)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **{CACHE: cache}, **options
    )
    return out.sequences, torch.stack(out.logits) if out.logits else None


def compare(got, want):
    """What two calls of `run` gave: the same tokens, and logits that differ by rounding alone."""
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-8, atol=1e-8)


def left_padded(lengths, seed):
    """Random prompts of the given lengths, left-padded: (ids, mask)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, VOCAB, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def random_keep(seed, empty=0.3):
    """[L, H, D] bool: random ratios per head, some heads empty, some full."""
    generator = torch.Generator().manual_seed(seed)
    ratio = torch.rand(LAYERS, HEADS, 1, generator=generator) * 1.2
    keep = torch.rand(LAYERS, HEADS, DIM, generator=generator) < ratio
    return keep & (torch.rand(LAYERS, HEADS, 1, generator=generator) >= empty)
