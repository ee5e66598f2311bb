"""Methods, prompts, a tokenizer and a benchmark, all tiny, for the tests of the replay."""

import dataclasses

import torch
from transformers import DynamicCache

from leank.eval.benchmarks.base import Cell, Row
from leank.eval.cache.hook import ATTENTION
from leank.eval.methods import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.lowest_frequencies import LowestFrequencies
from leank.eval.methods.channels.random import Random
from leank.eval.methods.channels.think import ThinK
from leank.mask import ChannelMask
from leank.versions import CACHE
from tests.helpers.cache_oracle import VOCAB, random_keep

SIZES = {"sink": 2, "window": 6, "flush": 4, "backend": "torch"}
NEW = 18  # tokens of a reply


class Letters:
    """A tokenizer that only decodes."""

    pad_token_id = 0
    eos_token_id = None

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))


def rows(count, new_tokens=NEW, **settings):
    """Samples whose context is the whole prompt; `settings` are fields of Row."""
    return [Row("t", str(i), "c", "q", ("x",), new_tokens, "ruler_all", **settings) for i in range(count)]


class Two:
    """A benchmark of two cells, of ids."""

    name, seed = "two", 0

    def data(self, task):
        return None

    def identity(self):
        return {}

    def cells(self):
        return [Cell("a", 40, ("0", "1")), Cell("b", 40, ("0",))]

    def row(self, cell, sample, tokenizer, overhead):
        return dataclasses.replace(rows(1)[0], id=sample, task=cell.task, chat=False)


def methods(seed=0):
    """Dense, a ragged mask, and three that need no training."""
    mask = ChannelMask(random_keep(seed))
    return [
        Method("dense"),
        Method("leank", LeanK(mask), **SIZES),
        Method("lowest", LowestFrequencies(0.5), **SIZES),
        Method("random", Random(0.5, seed), **SIZES),
        Method("think", ThinK(0.6, 4), **SIZES),
    ]


def prompts(lengths, seed=0):
    """Random token ids, one list a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def alone(model, method, ids, new_tokens, prefill, eos=None, min_new_tokens=None):
    """A separate model.generate() of one prompt with the method's cache: the new tokens.

    prefill: a dense pass over this prompt alone, for masks that depend on the sample.
    """
    from leank.eval.cache import compressed_cache

    cache = DynamicCache(config=model.config)
    if method.channels is not None:
        keep = method.channels.keep_mask(prefill, model.config)
        cache = compressed_cache(model, keep if keep.ndim == 3 else keep[0], **SIZES)
    model.set_attn_implementation(ATTENTION)
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=new_tokens,
        min_new_tokens=min_new_tokens,
        **{CACHE: cache},
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()
