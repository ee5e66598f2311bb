"""Methods of every kind at tiny sizes, and conversations on one cache; for tests of later turns, copies and files."""

import torch

from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.prefill import extend
from leank.eval.methods import Method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.channels.think import ThinK
from leank.eval.methods.reads.quest import Quest
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.lethe import Lethe
from leank.eval.methods.tokens.rkv import RKV
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.tova import TOVA
from leank.mask import ChannelMask
from tests.helpers.cache_oracle import left_padded, random_keep
from tests.helpers.replay_tools import SIZES

LEANK = LeanK(ChannelMask(random_keep(9)))
METHODS = {
    "leank": Method("leank", LEANK, **SIZES),
    "think": Method("think", ThinK(0.6, 4), **SIZES),
    "snapkv": Method("snapkv", tokens=SnapKV(14, 4), **SIZES),
    "h2o": Method("h2o", tokens=H2O(14), **SIZES),
    "tova": Method("tova", tokens=TOVA(14), **SIZES),
    "rkv": Method("rkv", tokens=RKV(14, 4), **SIZES),
    "lethe": Method("lethe", tokens=Lethe(evict_at=16, sparse_ratio=40.0), **SIZES),
    "kivi": Method("kivi", bits=KIVI(2, 4), **SIZES),
    "leank in 2 bits": Method("leank in 2 bits", LEANK, bits=KIVI(2, 4), **SIZES),
    "quest": Method("quest", reads=Quest(budget=16, page=4, dense_layers=0), **SIZES),
    "snapkv and think": Method("snapkv and think", ThinK(0.5, 4), tokens=SnapKV(14, 4), **SIZES),
}


def conversation(lengths, turns, seed=0):
    """(ids, mask) of padded prompts and of all turns, each of one length per row, and the columns of each turn."""
    parts = [left_padded(one, seed + i) for i, one in enumerate([lengths, *turns])]
    ids, mask = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return ids, mask.bool(), [part[0].shape[1] for part in parts]


def begin(method, model, ids, mask):
    """The method's cache with the prompts ids in it."""
    model.set_attn_implementation(ATTENTION)
    passed = method.run_prefill(model, ids, None if mask.all() else mask, 0)
    return method.cache(model, passed)


def go_on(model, cache, ids, mask, start, pieces):
    """The logits after each piece of the columns from `start` on, a row of the last dimension each."""
    found = []
    for piece in pieces:
        found.append(extend(model, cache, ids[:, start : start + piece], mask[:, : start + piece]))
        start += piece
    return found
