"""Passes that drop tokens on their way up, made layer by layer by hand: the slow, obvious forms for tests."""

import functools
import math

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache

from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.prefill.pyramid_infer import PyramidInfer
from tests.conftest import tiny_model
from tests.helpers.cache_oracle import VOCAB

LAYERS, LENGTH, NEW = 6, 60, 5
SEEN = []  # (queries, keys, attention) of the layers run by hand


def _exact(module, query, key, value, attention_mask, scaling=None, **kwargs):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.mT * scaling
    attention = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
    SEEN.append((query[0], key[0], attention[0]))
    return (attention @ value).transpose(1, 2), None


AttentionInterface.register("by_hand", _exact)


@functools.cache
def model_of(family="llama"):
    return tiny_model(family, num_hidden_layers=LAYERS, vocab_size=VOCAB)


class ByHand:
    """A prompt [T], layer by layer; select(layer, queries, keys, attention [Hq, T', T']) -> columns that go on."""

    def __init__(self, model, prompt, select=lambda *seen: None):
        model.set_attn_implementation("by_hand")
        self.model, self.length, self.cache, self.positions = model, len(prompt), DynamicCache(), []
        positions, hidden = torch.arange(len(prompt)), model.model.embed_tokens(torch.tensor([prompt]))
        for index, layer in enumerate(model.model.layers):
            mask = torch.full((hidden.shape[1], hidden.shape[1]), -math.inf).triu(1)
            hidden = self.through(layer, hidden, positions, mask)
            self.positions.append(positions)
            chosen = select(index, *SEEN.pop())
            if chosen is not None:
                hidden, positions = hidden[:, chosen], positions[chosen]
        self.logits = model.lm_head(model.model.norm(hidden))[:, -1]

    def through(self, layer, hidden, positions, mask):
        rotary = self.model.model.rotary_emb(hidden, positions[None])
        mask = None if mask is None else mask.to(hidden.dtype)[None, None]
        return layer(hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=self.cache)

    def decode(self, steps):
        """Greedy tokens at the positions that follow the whole prompt."""
        tokens, logits = [], self.logits
        for step in range(steps):
            tokens.append(int(logits.argmax()))
            hidden = self.model.model.embed_tokens(torch.tensor([tokens[-1:]]))
            for layer in self.model.model.layers:
                hidden = self.through(layer, hidden, torch.tensor([self.length + step]), None)
            logits = self.model.lm_head(self.model.model.norm(hidden))[:, -1]
        SEEN.clear()
        return tokens


def smooth(scores, kernel, pooling="avg"):
    """Mean or maximum of the `kernel` around each score; beyond the ends there are zeros."""
    half = kernel // 2
    padded = [0.0] * half + list(scores) + [0.0] * half
    around = [padded[i : i + kernel] for i in range(len(scores))]
    return [max(near) if pooling == "max" else sum(near) / kernel for near in around]


def highest(scores, count):
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])


def window_attention(attention, window, kernel, pooling="avg"):
    """Of each token before the window: what all heads of the last `window` queries give it, pooled by head."""
    of_heads = attention[:, -window:, :-window].sum(1).tolist()
    return [sum(of_token) for of_token in zip(*(smooth(head, kernel, pooling) for head in of_heads), strict=True)]


def slow_fastkv(method, layer):
    def select(index, queries, keys, attention):
        if index == layer:
            scores = window_attention(attention, method.window, method.kernel, method.pooling)
            tokens = attention.shape[-1]
            budget = method.budget if method.budget >= 1 else int(method.budget * tokens)
            best = highest(scores, budget - method.window)
            return torch.tensor(best + list(range(tokens - method.window, tokens)))
        return None

    return select


def slow_asl(method):
    """Algorithm 2 in dictionaries: the ranks of all layers are kept, the variance is taken token by token."""
    rank_of, state = {}, {}

    def select(index, queries, keys, attention):
        if "done" in state or (index == LAYERS - 1 and not method.two_pass):
            return None
        scores = window_attention(attention, method.window, method.kernel)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        rank_of[index] = {token: place + 1 for place, token in enumerate(order)}
        if index < method.first:
            return None
        latest = [rank_of[i] for i in range(max(0, index - method.observed + 1), index + 1)]
        first = method.budget - method.window
        union = {token for ranks in latest for token, rank in ranks.items() if rank <= first}
        variance = np.mean([np.var([ranks[token] for ranks in latest]) for token in union])
        state.setdefault("initial", variance)
        if variance / state["initial"] >= method.threshold:
            return None
        state["done"] = index
        return torch.tensor(sorted(order[:first]) + list(range(len(scores), len(scores) + method.window)))

    select.state = state
    return select


def slow_pyramid(method, length):
    recent = int(length * method.recent) + 1

    def select(index, queries, keys, attention):
        before = attention.shape[-1] - recent
        angle = math.cos(math.pi * index / LAYERS)
        keep = math.floor(before * ((1 - method.decay) * (angle + 1) / 2 + method.decay))
        if keep <= method.least or keep == before:
            return None
        rows = attention.mean(0)[-recent:, :before]
        weights = [1 + (method.newest - 1) * i / (recent - 1) for i in range(recent)]
        scores = sum(w * row for w, row in zip(weights, rows, strict=True)).tolist()
        kept = highest([math.inf] * method.sink + scores[method.sink :], keep)
        return torch.tensor(kept + list(range(before, before + recent)))

    return select


CASES = {
    "fastkv": (FastKV(20, 2, 4, 3), lambda m: slow_fastkv(m, 2)),
    "fastkv, a share, max": (FastKV(0.4, 2, 4, 5, "max"), lambda m: slow_fastkv(m, 2)),
    "asl": (ASL(24, 0.95, 4, 3, 2, 2), slow_asl),
    "pyramid": (PyramidInfer(0.2, 0.6, least=8, sink=2, newest=9.0), lambda m: slow_pyramid(m, LENGTH)),
}


def run(method, model, ids, real=None, room=NEW, obs=0):
    return method.run(model, ids, real, room, obs, None)
