"""An independent oracle for compressed caches: everything stays dense; masked channels of the middle are zeroed when
it is read, tokens that are not kept are not seen.

Shares no code with eval.cache. Tiny random models of four families to run it on.
"""

import functools

import torch
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

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
    """Dense keys and values, and per row how many real tokens have left the window.

    tokens: bool [B, H, T], the prompt's columns that stay in the middle; joins: bool [H], heads whose middle takes
    tokens that leave the window; values: bool [H, D], kept channels of V; None = all. center: [H, D], what pruned
    channels of K are read as, 0 by default.
    """

    def __init__(self, keep, sink, window, flush, tokens=None, joins=None, values=None, center=None):
        super().__init__()
        self.keep, self.sink, self.window, self.flush = keep, sink, window, flush
        self.tokens, self.joins, self.values_kept = tokens, joins, values
        self.center = torch.zeros(keep.shape) if center is None else center
        self.left, self.sealed, self.expected = None, None, 0

    def update(self, key_states, value_states, *args, **kwargs):
        super().update(key_states, value_states)
        return self, value_states

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.left = None if self.left is None else [self.left[i] for i in beam_idx.tolist()]
        self.sealed = None if self.sealed is None else [self.sealed[i] for i in beam_idx.tolist()]
        self.tokens = None if self.tokens is None else self.tokens[beam_idx]

    def stays(self, b, kv_head, columns):
        """Which of a row's real columns its middle would hold: those past the prompt's middle come from the window."""
        stay = torch.ones(len(columns), dtype=torch.bool)
        if self.sealed is not None:
            end = self.sealed[b]
            if self.tokens is not None:
                of_prompt = columns[:end][columns[:end] < self.tokens.shape[2]]
                stay[: len(of_prompt)] = self.tokens[b, kv_head, of_prompt]
            if self.joins is not None:
                stay[end:] = self.joins[kv_head]
        return stay

    def attend(self, q, mask, scaling, softcap=None, s_aux=None):
        """A sealed layer takes the columns one by one: each query finds the window as it is when its token comes."""
        new, length = q.shape[2], self.keys.shape[2]
        real = torch.ones(len(q), length, dtype=torch.bool) if mask is None else mask[:, :length].bool()
        sealed = self.left is not None
        out, size = [], 1 if sealed else new
        for first in range(0, new, size):
            end = length - new + first + size
            out.append(self._columns(q[:, :, first : first + size], real[:, :end], scaling, softcap, s_aux))
            if sealed:
                over = [
                    n - left - self.window for n, left in zip(real[:, :end].sum(1).tolist(), self.left, strict=True)
                ]
                self.leave(real[:, :end], [max(0, n) // self.flush * self.flush for n in over])
        if not sealed and length >= self.expected:
            self.left = [self.sink] * len(q)
            self.leave(real, [max(0, n - self.window - self.sink) for n in real.sum(1).tolist()])
            self.sealed = list(self.left)
        return torch.cat(out, 2).transpose(1, 2).contiguous()

    def leave(self, real, due):
        """The oldest `due` [B] tokens of each row's window become middle; real [B, T]."""
        self.left = [left + n for left, n in zip(self.left, due, strict=True)]

    def _columns(self, q, real, scaling, softcap, s_aux):
        """Attention of q [B, Hq, n, D], the last n columns of real [B, T]: [B, Hq, n, D]."""
        batch, _, new, _ = q.shape
        length = real.shape[1]
        out = torch.zeros_like(q)
        group = q.shape[1] // self.keep.shape[0]
        for b in range(batch):
            columns = real[b].nonzero()[:, 0]
            index = torch.arange(len(columns))
            rows = real[b, length - new :].nonzero()[:, 0]  # queries that are no padding
            left = self.sink if self.left is None else self.left[b]
            middle = (index >= self.sink) & (index < left)
            for h in range(q.shape[1]) if len(rows) else ():
                keep = self.keep[h // group]
                k, v = (x[b, h // group, columns].clone() for x in (self.keys, self.values))
                k[middle] = torch.where(keep, k[middle], self.center[h // group].to(k.dtype))
                if self.values_kept is not None:
                    v[middle] *= self.values_kept[h // group]
                gone = middle & (~self.stays(b, h // group, columns) | (not keep.any()))
                sees = causal(len(rows), len(columns)) & ~gone
                one = (x[None, None] for x in (q[b, h, rows], k, v))
                out[b, h, rows] = attention(*one, scaling, sees, softcap, None if s_aux is None else s_aux[h : h + 1])
        return out


class RoundingOracle(OracleLayer):
    """An OracleLayer whose tokens are rounded where they lie when they enter the middle.

    rounded: (head, k, v) -> k, v, each [n, D], the tokens of one head that enter together.
    """

    def __init__(self, keep, sizes, rounded):
        super().__init__(keep, *sizes)
        self.rounded = rounded

    def leave(self, real, due):
        for b, (first, n) in enumerate(zip(self.left, due, strict=True)):
            moved = real[b].nonzero()[first : first + n, 0]
            for h in range(len(self.keep)):
                k, v = self.keys[b, h, moved], self.values[b, h, moved]
                self.keys[b, h, moved], self.values[b, h, moved] = self.rounded(h, k, v)
        super().leave(real, due)


def oracle_cache(keep, sink, window, flush, expected=0, **by_layer):
    """by_layer: of each layer tokens, joins, values, center; see OracleLayer."""
    layers = [
        OracleLayer(k, sink, window, flush, **{name: each[i] for name, each in by_layer.items()})
        for i, k in enumerate(keep)
    ]
    for layer in layers:
        layer.expected = expected
    return Cache(layers=layers)


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
        ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, past_key_values=cache, **options
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
