"""Quest and Double Sparsity: what a query reads, against loops over single tokens; with everything to read nothing
changes."""

import itertools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leank.eval.cache import CompressedLayer, Sizes
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.storage.middle import Middle
from leank.eval.methods.reads.double_sparsity import DoubleSparsity, Labels
from leank.eval.methods.reads.quest import Quest
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, random_keep

SIZES = Sizes(2, 6, 4)


def layer_of(reads, lengths, seed, keep=None, grow=0):
    """A compressed layer of random rows, `grow` tokens later: (layer, (K, V) of all real tokens of each row)."""
    torch.manual_seed(seed)
    width = max(lengths)
    k, v = torch.randn(2, len(lengths), HEADS, width, DIM, dtype=torch.float64)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    layer = CompressedLayer(Middle(channels=keep, reads=reads), SIZES, choose_backend("torch"))
    layer.compress(k, v, real)
    rows = [(k[r][:, real[r]], v[r][:, real[r]]) for r in range(len(lengths))]
    mask = real
    for _ in range(grow):
        new_k, new_v = torch.randn(2, len(lengths), HEADS, 1, DIM, dtype=torch.float64)
        mask = torch.cat([mask, mask.new_ones(len(lengths), 1)], 1)
        layer.update(new_k, new_v)
        layer.attend(torch.randn(len(lengths), 2 * HEADS, 1, DIM, dtype=torch.float64), mask)
        rows = [(torch.cat([a, x], 1), torch.cat([b, y], 1)) for (a, b), x, y in zip(rows, new_k, new_v, strict=True)]
    return layer, rows


def by_hand(q, k, v, keep, start, chosen):
    """Attention of one query of one head: sink, window from `start`, and of the middle the tokens `chosen`."""
    logits = {}
    for j in range(len(k)):
        if j < SIZES.sink or j >= start:
            logits[j] = float(q @ k[j])
        elif j - SIZES.sink in chosen:
            logits[j] = float(q[keep] @ k[j][keep])
    top = max(logits.values())
    weights = {j: torch.tensor(x - top, dtype=torch.float64).exp() for j, x in logits.items()}
    return sum(w * v[j] for j, w in weights.items()) / sum(weights.values())


def pages_by_hand(q, middle, page, most):
    """Tokens of the pages with the highest bound, one page and channel after the other."""
    bounds = {}
    for number, start in enumerate(range(0, len(middle), page)):
        tokens = middle[start : start + page]
        bounds[number] = sum(max(float(x * tokens[:, c].min()), float(x * tokens[:, c].max())) for c, x in enumerate(q))
        assert bounds[number] >= max(float(q @ t) for t in tokens) - 1e-12
    best = sorted(bounds, key=lambda n: -bounds[n])[:most]
    return {j for n in best for j in range(n * page, (n + 1) * page)}


def rounded_by_hand(values, bits):
    """A token's label channels, to the nearest of 2^bits values from the least to the largest of them."""
    least, step = min(values), (max(values) - min(values)) / (2**bits - 1)
    return [round((x - least) / step) * step + least if step else x for x in values]


@settings(max_examples=25, deadline=None)
@example(seed=0, lengths=[60, 40], page=1, budget=16, grow=3, bits=2)
@example(seed=1, lengths=[60, 40], page=1, budget=16, grow=3, bits=4)
@example(seed=2, lengths=[5, 40], page=5, budget=30, grow=60, bits=None)
@example(seed=3, lengths=[33, 7], page=3, budget=30, grow=60, bits=16)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=2),
    page=st.integers(1, 7),
    budget=st.integers(8, 60),
    grow=st.integers(0, 9),
    bits=st.sampled_from([None, None, 2, 4, 16]),
)
def test_a_step_reads_what_the_loops_choose(seed, lengths, page, budget, grow, bits):
    """Quest, or Double Sparsity with labels of so many bits."""
    keep = random_keep(seed)[0]
    label = torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(seed)) < 0.5
    reads = Labels(label, budget, bits) if bits else Quest(budget, page, 0)
    layer, rows = layer_of(reads, lengths, seed, keep, grow)
    store = layer.store
    q = torch.randn(len(lengths), 2 * HEADS, 1, DIM, dtype=torch.float64)
    position = torch.tensor(store.seen)[:, None] - 1
    out = layer.choice.choose(store, q).attend(store, q, position, 1.0)
    for row, head in itertools.product(range(len(lengths)), range(2 * HEADS)):
        of, (k, v) = keep[head // 2], (x[head // 2] for x in rows[row])
        start, one = max(SIZES.sink, int(store.start[row])), q[row, head, 0]
        middle, chosen = k[SIZES.sink : start][:, of], set()
        spare = budget - SIZES.sink - SIZES.window
        if of.any() and bits:
            few = label[head // 2][of]
            if not few.any():  # all tokens tie
                continue
            stored = [t[few] if bits == 16 else t.new_tensor(rounded_by_hand(t[few].tolist(), bits)) for t in middle]
            scores = [float(one[of][few] @ t) for t in stored]
            chosen = set(sorted(range(len(scores)), key=lambda j: -scores[j])[:spare])
        elif of.any():
            chosen = pages_by_hand(one[of], middle, page, max(1, spare // page))
        torch.testing.assert_close(out[row, 0, head], by_hand(one, k, v, of, start, chosen))


def test_double_sparsity_leaves_its_first_layers_dense():
    choice = DoubleSparsity(dense_layers=1)
    choice._found[choice.labels.calibrated_on] = torch.rand(LAYERS, HEADS, DIM)
    assert choice.of_layer(0) is None
    assert isinstance(choice.of_layer(1), Labels)
    assert "dense_layers" in choice.identity()
