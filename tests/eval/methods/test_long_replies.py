"""Methods that evict while they decode: rounds, scores, and Lethe's."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from leank.eval.cache import Sizes
from leank.eval.cache.attention.backend import Auto
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.eviction import HeavyHitters, largest
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Store
from leank.eval.inference import decode
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.memory import method_bytes
from leank.eval.methods.tokens.expected_attention import frequencies
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.keydiff import KeyDiff
from leank.eval.methods.tokens.lethe import Lethe, hoyer
from leank.eval.methods.tokens.rkv import RKV
from leank.eval.methods.tokens.tova import TOVA
from leank.eval.methods.tokens.triattention import TriAttention
from leank.mask import ChannelMask
from tests.conftest import tiny_model
from tests.helpers.drawn import calibrated
from tests.oracles import cache_attention as naive
from tests.oracles import triattention
from tests.oracles.attention import weights as attention_weights

RUNNING = []  # the slow form whose turn it is


class Held:
    """One layer: all keys and values [H, T, D], the scores [H, T], and what each head's middle holds."""

    def __init__(self, keys, values, scores, middle, start):
        self.keys, self.values, self.scores, self.middle, self.start = keys, values, scores, middle, start
        self.evict_at, self.prompt = None, keys.shape[1]

    @property
    def tokens(self):
        return self.keys.shape[1]

    def append(self, key, value, decay):
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        self.scores = torch.cat([decay * self.scores, self.scores.new_zeros(len(key), 1)], 1)


class Slow:
    """One prompt; the choice is H2O, TOVA, KeyDiff, TriAttention, R-KV or Lethe.

    keep: bool [L, H, D]; means: [L, H, D], what pruned channels count as, and what KeyDiff and R-KV rank keys without
    """

    def __init__(self, choice, sizes, keep, config, means=None):
        self.config, self.means = config, torch.zeros(keep.shape) if means is None else means
        self.choice, self.sizes, self.keep = choice, sizes, keep
        self.layers = [None] * len(keep)
        self.decay = {TOVA: 0.0, RKV: 1 - 1 / getattr(choice, "queries", 1), Lethe: getattr(choice, "gamma", 1)}.get(
            type(choice), 1.0
        )

    def attend(self, index, q, k, v, scaling):
        if self.layers[index] is None:
            return self.prompt(index, q, k, v, scaling)
        held, (heads, group) = self.layers[index], (len(k), len(q) // len(k))
        held.append(k, v, self.decay)
        out = torch.zeros_like(q)
        for head in range(heads):
            kept = self.keep[index, head]
            middle = held.middle[head] if kept.any() else []
            keys = held.keys[head].clone()
            keys[middle] = keys[middle].where(kept, self.means[index, head].to(keys))
            for one in range(head * group, (head + 1) * group):
                tokens = self.around(middle, held)
                weights = (keys[tokens] @ q[one, 0] * scaling).softmax(0)
                out[one, 0] = weights @ held.values[head, tokens]
                held.scores[head, tokens] += weights
        self.flush(index, held)
        return out

    def prompt(self, index, q, k, v, scaling):
        heads, tokens = k.shape[:2]
        group, choice, sizes = len(q) // heads, self.choice, self.sizes
        weights = attention_weights(q[None], k[None], scaling)[0]
        sums = weights.sum(1).unflatten(0, (heads, group)).sum(1)
        start = max(sizes.sink, tokens - sizes.window)
        certain = start
        if isinstance(choice, RKV):
            certain = max(sizes.sink, tokens - max(sizes.window, choice.queries))
            recent = weights[:, -choice.queries :].mean(1).unflatten(0, (heads, group)).mean(1)
            sums = torch.zeros_like(sums)
            ranks = [self.rkv(recent[head], k[head], range(tokens), observed=choice.queries) for head in range(heads)]
        elif isinstance(choice, TOVA):
            ranks, sums = [weights[:, -1].mean(0)] * heads, torch.zeros_like(sums)
        elif isinstance(choice, KeyDiff):
            ranks, sums = [self.keydiff(k[head]) for head in range(heads)], torch.zeros_like(sums)
        elif isinstance(choice, TriAttention):
            ranks = [self.triattention(index, head, k[head], range(tokens), tokens) for head in range(heads)]
            sums = torch.zeros_like(sums)
        else:
            ranks = sums
        middle = [list(range(sizes.sink, start)) if kept.any() else [] for kept in self.keep[index]]
        self.layers[index] = held = Held(k, v, sums, middle, start)
        if isinstance(choice, (H2O, TOVA, RKV, KeyDiff, TriAttention)):
            room = choice.budget - sizes.sink - sizes.window - (start - certain)
            for head, rank in enumerate(ranks):
                best = sorted(range(sizes.sink, certain), key=lambda j, rank=rank: (-float(rank[j]), j))[:room]
                if held.middle[head]:
                    held.middle[head] = sorted(best) + list(range(certain, start))
        if isinstance(choice, Lethe):
            held.evict_at = choice.evict_at
            self.round(held)
        return weights @ v.repeat_interleave(group, 0)

    def around(self, middle, held):
        """Tokens of the middle between those of sink and window."""
        return [*range(min(self.sizes.sink, held.tokens)), *middle, *range(held.start, held.tokens)]

    def flush(self, index, held):
        """Tokens leave the window, and then the middle."""
        choice, sizes = self.choice, self.sizes
        due = max(0, held.tokens - held.start - sizes.window) // sizes.flush * sizes.flush
        for middle, kept in zip(held.middle, self.keep[index], strict=True):
            middle += range(held.start, held.start + due) if kept.any() else ()
        held.start += due
        if due and isinstance(choice, (H2O, TOVA, RKV, KeyDiff, TriAttention)):
            room = choice.budget - sizes.sink - sizes.window
            for head, middle in enumerate(held.middle):
                if len(middle) > room:
                    rank = self.rank(index, head, held)
                    held.middle[head] = sorted(sorted(middle, key=lambda j, rank=rank: (-float(rank[j]), -j))[:room])
        if isinstance(choice, Lethe):
            self.round(held)

    def rank(self, index, head, held):
        if isinstance(self.choice, TOVA):
            return held.scores.sum(0)
        if isinstance(self.choice, H2O):
            return held.scores[head]
        kept, mean = self.keep[index, head], self.means[index, head]
        if isinstance(self.choice, KeyDiff):
            middle = held.middle[head]
            ranks = self.keydiff(((held.keys[head] - mean) * kept)[middle]).tolist()
            return dict(zip(middle, ranks, strict=True))
        if isinstance(self.choice, TriAttention):
            middle = held.middle[head]
            keys = held.keys[head].where(kept, mean.to(held.keys))[middle]
            first = sum(j < held.prompt for j in middle) if self.choice.keep_prompt else 0
            first = first if first < len(middle) else 0
            found = self.triattention(index, head, keys, middle, held.tokens, first).tolist()
            return {j: score + 1e6 * (n < first) for n, (j, score) in enumerate(zip(middle, found, strict=True))}
        tokens = self.around(held.middle[head], held)
        share = held.scores[head, tokens] / held.scores[head, tokens].sum()
        observed = held.tokens - held.start
        found = self.rkv(share, (held.keys[head] - mean) * kept, held.middle[head], tokens, observed)
        return dict(zip(tokens, found, strict=True))

    def keydiff(self, keys):
        """Minus the cosine of each of keys [n, D] with the mean of their directions."""
        anchor = sum(key / key.norm() for key in keys) / len(keys)
        return torch.stack([-(key @ anchor) / (key.norm() * anchor.norm()) for key in keys])

    def triattention(self, index, head, keys, places, now, first=0):
        """The scores of keys [n, D] that stand at `places`, as the next token comes to `now`."""
        means, sizes = self.choice._found[self.choice.calibrated_on][index].unbind(1)
        group = len(means) // self.keep.shape[1]
        of_head = slice(head * group, (head + 1) * group)
        given = means[of_head], sizes[of_head].real, frequencies(self.config), self.choice.future
        return triattention.scores(keys, places, now, *given, first)

    def rkv(self, importance, keys, compared, tokens=None, observed=0):
        """Z of `tokens`, of which those `compared` have a redundancy, and the last ones are `observed`."""
        choice, reach = self.choice, self.choice.kernel // 2
        tokens = list(compared) if tokens is None else tokens
        end = len(tokens) - (observed if choice.pooled == "earlier" else 0)
        near = [importance[max(0, n - reach) : min(end, n + reach + 1)] for n in range(len(tokens))]
        pooled = [float(some.max()) if len(some) else 0.0 for some in near]
        unit = keys[list(compared)] / keys[list(compared)].norm(dim=-1, keepdim=True)
        alike = unit @ unit.mT
        alike.fill_diagonal_(0)
        for line in alike:
            above = (line > choice.threshold).nonzero()[:, 0]
            if len(above):
                line[above[-1]] = 0
        redundant = dict(zip(compared, alike.mean(0).softmax(0).tolist(), strict=True))
        return torch.tensor([
            choice.mix * p - (1 - choice.mix) * redundant.get(j, 0.0) for j, p in zip(tokens, pooled, strict=True)
        ])  # fmt: skip

    def round(self, held):
        """Algorithm 1 of Lethe; all heads that have channels hold the same tokens."""
        choice, of_heads = self.choice, [head for head, middle in enumerate(held.middle) if middle]
        middle = held.middle[of_heads[0]] if of_heads else []
        tokens = self.around(middle, held)
        count = len(tokens)
        if not middle or count <= held.evict_at:
            return
        scores = held.scores[of_heads].sum(0)[tokens]
        order = sorted(range(count), key=lambda n: (-float(scores[n]), -n))
        hoyer = (math.sqrt(count) - float(scores.sum() / scores.norm())) / (math.sqrt(count) - 1)
        cuts = [count * d // choice.segments for d in range(1, choice.segments)]
        ratios = [float(scores[order[0]] / scores[order[cut]]) for cut in cuts]
        sharp = [r >= choice.sparse_ratio if choice.reading == "text" else r <= choice.sparse_ratio for r in ratios]
        found = [cut for cut, fits in zip(cuts, sharp, strict=True) if cut and fits and hoyer >= choice.min_sparsity]
        if not found:
            held.evict_at *= 2
            return
        recent = int(choice.recent_ratio * count)
        held.evict_at = max(held.evict_at, found[0] + recent)
        stay = {tokens[n] for n in order[: found[0]]} | set(tokens[count - recent :])
        held.middle = [[j for j in of_head if j in stay] for of_head in held.middle]


def _slow(module, query, key, value, mask, scaling, **kwargs):
    return RUNNING[-1].attend(module.layer_idx, query[0], key[0], value[0], scaling).transpose(0, 1)[None], None


AttentionInterface.register("slow_replies", _slow)


@functools.cache
def random_model(dim, heads, group, layers):
    """A model of random weights whose attention is peaked enough that a token that is gone changes its logits."""
    width = 4 * heads * group
    return tiny_model(
        "llama", dim, vocab_size=97, hidden_size=width, intermediate_size=16, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads * group, num_key_value_heads=heads, initializer_range=1.2 / width**0.5,
        max_position_embeddings=4096, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def replayed(chosen, model, ids, real, forced):
    """Logits [B, 1 + n, vocabulary] of forced replies, by the method's own cache."""
    found = chosen.run_prefill(model, ids, real, forced.shape[1])
    cache, logits, start = chosen.cache(model, found), [found.logits], ids.shape[1]
    whole = torch.cat([real, real.new_ones(forced.shape)], 1)
    for step in range(forced.shape[1]):
        place = {"attention_mask": whole[:, : start + step + 1], "position_ids": (found.lengths + step)[:, None]}
        logits.append(model(forced[:, step : step + 1], past_key_values=cache, **place).logits[:, -1])
    return torch.stack(logits, 1), cache


def slow_replies(slow, model, prompt, forced):
    """The same of one prompt without padding, by the slow form."""
    model.set_attn_implementation("slow_replies")
    RUNNING.append(slow)
    logits = [model(prompt, use_cache=False).logits[:, -1]]
    for step in range(forced.shape[1]):
        place = torch.tensor([[prompt.shape[1] + step]])
        logits.append(model(forced[:, step : step + 1], position_ids=place, use_cache=False).logits[:, -1])
    RUNNING.pop()
    return torch.cat(logits)


# head_dim, KV heads, group, layers; sink, window, flush; lengths; choice; share of channels gone, None of a
# mask that leaves the last head none, "means" of a mask with mean keys
CASES = {
    "h2o": ((80, 1, 7, 2), (0, 0, 1), (33, 90), {"name": "h2o", "budget": 9}, 0.5),
    "h2o, nothing": ((96, 2, 1, 1), (3, 1, 8), (70, 1), {"name": "h2o", "budget": 4}, 0),
    "h2o, an empty head": ((16, 2, 2, 2), (2, 4, 3), (37, 12), {"name": "h2o", "budget": 16}, None),
    "keydiff": ((16, 2, 2, 2), (2, 4, 3), (60, 7), {"name": "keydiff", "budget": 20}, 0.5),
    "keydiff, an empty head": ((16, 2, 2, 2), (0, 5, 1), (37, 12), {"name": "keydiff", "budget": 14}, None),
    "triattention": ((16, 2, 2, 1), (2, 4, 7), (40, 7), {"name": "triattention", "budget": 20, "future": 99}, 0),
    "triattention, an empty head": ((16, 2, 2, 2), (0, 0, 8), (37, 12),
                                    {"name": "triattention", "budget": 14, "future": 5}, None),
    "triattention, the prompt stays": ((16, 2, 2, 1), (2, 4, 7), (40, 7),
                                       {"name": "triattention", "budget": 20, "future": 99, "keep_prompt": True}, 0.5),
    **{
        f"{name}, means": ((16, 2, 2, 2), (2, 4, 3), (40, 7), {"name": name, "budget": 20, **more}, "means")
        for name, more in (("triattention", {"future": 99}), ("keydiff", {}), ("rkv", {"queries": 4}), ("h2o", {}))
    },
    "tova": ((96, 1, 3, 1), (0, 0, 3), (60, 7, 1), {"name": "tova", "budget": 25}, 0.5),
    "rkv": ((16, 1, 7, 2), (3, 6, 1), (60, 7),
            {"name": "rkv", "budget": 30, "queries": 8, "kernel": 3, "threshold": 0.2}, 0.5),
    "rkv, pooled as officially": ((16, 1, 7, 2), (3, 6, 1), (60, 7),
            {"name": "rkv", "budget": 30, "queries": 8, "kernel": 7, "pooled": "earlier", "mix": 0.9}, 0.5),
    "rkv, window": ((80, 2, 1, 1), (0, 12, 8), (40, 90),
                    {"name": "rkv", "budget": 33, "queries": 4, "mix": 0.5}, 0),
    "lethe": ((80, 1, 3, 2), (0, 6, 3), (33, 90),
              {"name": "lethe", "sparse_ratio": 3.0, "gamma": 0.9, "evict_at": 36, "min_sparsity": 0.1}, 0.5),
    "lethe, an empty head": ((16, 2, 2, 2), (2, 4, 3), (36, 15),
                             {"name": "lethe", "sparse_ratio": 3.0, "segments": 5, "gamma": 0.9, "evict_at": 20}, None),
    "lethe, printed": ((96, 2, 1, 1), (3, 0, 1), (60, 7, 1),
                       {"name": "lethe", "recent_ratio": 0.0, "evict_at": 9, "segments": 4, "reading": "printed"}, 0),
}  # fmt: skip


@pytest.mark.parametrize("steps", [70, pytest.param(1050, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_replies_are_those_of_the_slow_form(case, steps):
    """Every row of a padded batch, and what its heads still hold."""
    (dim, heads, group, layers), (sink, window, flush), lengths, config, ratio = CASES[case]
    model = random_model(dim, heads, group, layers)
    given = {"tokens": config}
    if isinstance(ratio, float):
        given["channels"] = {"name": "random", "ratio": ratio}
    means = None
    if ratio in (None, "means"):
        drawn = torch.Generator().manual_seed(3)
        mask = torch.rand(layers, heads, dim, generator=drawn) < 0.5
        if ratio is None:
            mask[-1, -1] = False
        else:
            means = torch.randn(mask.shape, generator=drawn)
        given["channels"] = {"name": "leank", "mask": ChannelMask(mask, mean_keys=means)}
    chosen = build_method(case, given, {"sink": sink, "window": window, "flush": flush, "backend": "torch"})
    choice = calibrated(chosen, model.config).tokens
    whole = torch.ones(layers, heads, dim, dtype=torch.bool)
    keep = whole if chosen.channels is None else chosen.channels.keep_mask(None, model.config)
    generator, width = torch.Generator().manual_seed(dim), max(lengths)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 97, real.shape, generator=generator) * real
    forced = torch.randint(2, 97, (len(lengths), steps), generator=generator)
    found, cache = replayed(chosen, model, ids, real, forced)
    for row, length in enumerate(lengths):
        slow = Slow(choice, Sizes(sink, window, flush), keep, model.config, means)
        want = slow_replies(slow, model, ids[row : row + 1, width - length :], forced[row : row + 1])
        torch.testing.assert_close(found[row], want, rtol=1e-6, atol=1e-8)
        for layer, held in zip(cache.layers, slow.layers, strict=True):
            middle = layer.store.prompt.length[row] + layer.store.tail.length[row]
            assert middle.tolist() == [len(of_head) for of_head in held.middle]
    dense = prefill(model, ids, real, 1)
    everything = [int(n) + steps - sink - window for n in dense.lengths]
    for layer in cache.layers:  # something was evicted
        assert (layer.store.tail.length + layer.store.prompt.length).max() < max(everything)


SINK, WINDOW, FLUSH = SIZES = 2, 4, 3


def decoding(policy, steps, peaked, seed=0, start=60, heads=2, dim=8):
    """A store that evicts: yields it after sealing and after each step of random attention, peaked or nearly flat."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 2, heads, start, dim, generator=generator)
    scores = (torch.randn(2, heads, start, generator=generator) * (4 if peaked else 0.02)).exp()
    store = Store(k, v, None, Middle(eviction=policy), Sizes(*SIZES), scores=scores)
    yield store
    for _ in range(steps):
        position = store.append(*torch.randn(2, 2, heads, 1, dim, generator=generator))
        q = torch.randn(2, 2 * heads, 1, dim, generator=generator)
        naive.attend(store, q, position, 6.0 if peaked else 0.01)
        store.flush()
        yield store


def held(store):
    """Tokens of each row and head, in all."""
    ends = np.minimum(store.seen, SINK) + np.maximum(0, store.seen - store.start)
    return store.prompt.length + store.tail.length + ends[:, None]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(["text", "printed"]),
    st.booleans(),
    st.sampled_from([2.0, 400.0]),
    st.floats(0, 0.9),
    st.integers(2, 9),
    st.integers(0, 99),
)
def test_whatever_the_attention_memory_is_bounded_and_both_ends_stay(reading, peaked, tau, ratio, segments, seed):
    """No layer holds more than its limit; the ends are untouched; nothing leaves before the store expects it."""
    options = Lethe(tau, ratio, segments, 0.9, evict_at=20, reading=reading, limit=50)
    quiet, before = 0, None
    for store in decoding(options.eviction(None, None, Sizes(*SIZES)), 60, peaked, seed):
        middle = store.prompt.length + store.tail.length
        assert quiet <= 1 or np.array_equal(middle, before)
        quiet, before = store.quiet, middle
        assert held(store).max() <= 50
        assert (store.seen - store.start >= WINDOW).all()
        assert (store.eviction.evict_at <= 50).all()
        assert np.array_equal(store.eviction.held, held(store))
        memory, room = measure_store(store), 64 + 192 + SINK + 64  # slots of prompt, tail, sink and ring
        assert memory.total - memory.tables - memory.extra <= 2 * 2 * room * 2 * 8 * 4


@pytest.mark.parametrize("name", ["h2o", "tova", "keydiff", "triattention", "rkv"])
@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    sink=st.integers(0, 3), window=st.integers(0, 9), flush=st.integers(1, 7), heavy=st.integers(0, 12),
    start=st.integers(2, 40), less=st.integers(0, 39), ratio=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_step_of_a_reply_holds_more_than_the_budget(name, sink, window, flush, heavy, start, less, ratio, seed):
    """Tokens of a head: the budget, and those of the window that wait for the next flush, fewer than `flush`.

    One row has `less` tokens of padding, so that it flushes and evicts at steps of its own.
    """
    rows, heads, dim = 2, 2, 8
    window = max(window, 4) if name == "rkv" else window  # of which the observed tokens are a part
    options = {"queries": 4} if name == "rkv" else {}
    config = {"tokens": {"name": name, "budget": max(1, sink + window + heavy), **options}}
    config |= {"channels": {"name": "random", "ratio": ratio}} if ratio else {}
    model = random_model(dim, heads, 1, 1)
    chosen = build_method("one", config, {"sink": sink, "window": window, "flush": flush, "backend": "torch"})
    chosen = calibrated(chosen, model.config)
    ids = torch.randint(2, 97, (rows, start + 40), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(start + 40) >= torch.tensor([0, min(less, start - 1)])[:, None]
    passed = chosen.run_prefill(model, ids[:, :start], real[:, :start], 40)
    cache = chosen.cache(model, passed)
    (layer,), token = cache.layers, 2 * heads * dim * 8  # bytes of a token that no channel is gone from
    for step in range(41):
        store, memory = layer.store, cache.memory()
        waiting = np.maximum(0, store.seen - store.start)
        middle = store.prompt.length + store.tail.length
        everything = middle + (np.minimum(store.seen, sink) + waiting)[:, None]
        assert everything.max() <= chosen.tokens.budget + flush - 1
        assert (everything - waiting[:, None] + np.minimum(waiting, window)[:, None]).max() <= chosen.tokens.budget
        kept = memory.sink + memory.window + memory.middle_k + memory.middle_v
        whole = method_bytes(chosen, model.config, start + step, 8)
        assert kept <= rows * (whole + (flush - 1) * token)
        assert memory.extra <= rows * heads * 4 * (chosen.tokens.budget + flush - 1)
        if step < 40:
            decode.read(model, cache, ids[:, start + step, None], real[:, : start + step + 1])
    for row, tokens in enumerate(real.sum(-1).tolist()):  # and the budget is used
        assert everything[row].max() >= min(tokens, chosen.tokens.budget)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=20, max_size=60), st.floats(0, 0.9), st.integers(0, 3),
       st.integers(2, 6), st.floats(1.5, 50), st.integers(-2, 20))  # fmt: skip
def test_a_round_beyond_the_limit_keeps_sink_recent_and_best_of_the_others(values, ratio, sink, segments, tau, less):
    """Beside a row that holds three tokens more; the limit is `less` than what would stay without one."""
    count, scores = len(values), torch.tensor([[*values, 0, 0, 0]]).float()

    def of_round(limit):
        options = Lethe(tau, ratio, segments, 0.9, evict_at=19, limit=limit)
        policy = options.eviction(None, None, Sizes(*SIZES)).begin(scores[None], np.array([[count]]))
        (stay,) = policy._round(np.array([0]), scores, np.array([count]), np.array([sink]), np.array([0]))
        return set(stay[:count].nonzero().flatten().tolist()), int(policy.evict_at[0])

    free, wanted = of_round(0)
    limit = max(1, len(free) - less)
    bounded, evict_at = of_round(limit)
    assert evict_at == min(wanted, limit)
    if len(free) > limit:
        recent = int(ratio * limit)
        others = sorted(range(sink, count - recent), key=lambda i: (-values[i], -i))
        room = max(0, limit * (segments - 1) // segments - sink - recent)
        free = {*range(sink), *others[:room], *range(count - recent, count)}
    assert bounded == free


def test_hoyer_sparsity():
    assert hoyer(torch.ones(7)) == pytest.approx(0, abs=1e-6)
    assert hoyer(torch.eye(5)[2]) == pytest.approx(1)
    assert hoyer(torch.tensor([3.0, 4.0])) == pytest.approx((2**0.5 - 7 / 5) / (2**0.5 - 1), abs=1e-6)
    a = torch.rand(50)
    assert float(hoyer(9 * a)) == pytest.approx(float(hoyer(a)), abs=1e-5)
    assert hoyer(a**4) > hoyer(a)


def test_of_equal_scores_the_later_tokens_stay():
    assert largest(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).tolist() == [False, True, False, True]


def test_rows_take_their_scores_and_thresholds_along():
    options = Lethe(3.0, 0.1, 8, 0.9, evict_at=20)
    store = list(decoding(options.eviction(None, None, Sizes(*SIZES)), 9, True))[-1]
    store.eviction.evict_at[:] = [21, 22]
    scores = store.eviction.scores.clone()
    store.select(torch.tensor([1, 1, 0]))
    assert store.eviction.evict_at.tolist() == [22, 22, 21]
    assert torch.equal(store.eviction.scores[2], scores[0])
    store.append(*torch.randn(2, 3, 2, 1, 8))
    naive.see(store.eviction, 0, 0, torch.ones(int(held(store)[0, 0])))
    assert torch.equal(naive.scores_of(store.eviction, 1, 0), scores[1, 0])  # rows that came from one go their own ways


def test_what_cannot_be_is_refused(monkeypatch):
    store = list(decoding(HeavyHitters(10), 4, True))[-1]
    with pytest.raises(ValueError, match="counted in the attention by which this layer evicts"):
        store.crop(1)
    with pytest.raises(ValueError, match="cannot be combined with a choice on the axis reads"):
        Middle(eviction=HeavyHitters(3), reads=object())
    monkeypatch.setattr("leank.eval.cache.attention.backend.why_not", lambda *args: None)
    store.middle = Middle(eviction=HeavyHitters(3), joins=torch.tensor([True, False]))
    with pytest.raises(RuntimeError, match="the kernel evicts where every head takes new tokens"):
        Auto(insist=True).choose(store, torch.randn(2, 4, 1, 8))
