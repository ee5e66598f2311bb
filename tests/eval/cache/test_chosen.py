"""Decoding steps that choose what they read, and the choice itself, in Triton, against loops and a stable sort: in the
interpreter on a CPU, on the device with `-m gpu`."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_model
from tests.helpers.kernels import DEVICE, ON_GPU, make_store, poison

from leank.eval.cache.attention import choose as launch  # isort: skip  (needs Triton, which the line above asks for)
import triton

from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.backend import choose_backend, why_not_middle
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.choose import Chosen, ChosenConfig, lines_held
from leank.eval.cache.attention.kernels import choose
from leank.eval.cache.attention.ranking import FIELDS, Bounds, Column
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.eviction import HeavyHitters, largest
from leank.eval.cache.storage.kernels import choosing
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from tests.helpers.thinned import at_length, thinned
from tests.oracles import cache_attention as naive

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # in the interpreter what is chosen shall not depend on rounding
CLOSE = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-5}


def random_reads(kind, budget, heads, dim, page=16, seed=0):
    """Quest, or Double Sparsity with an eighth of the channels as labels, whole or in 4 bits."""
    if kind is None:
        return None
    if kind == "quest":
        return Quest(budget, page, 0)
    order = torch.rand(heads, dim, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return Labels(order < dim // 8, budget, 4 if kind == "four bits" else 16)


def store_of(reads, counts, dim, lengths, sizes, seed=0):
    return make_store(counts, dim, lengths, sizes, DTYPE, seed, reads=reads)


def step_of(store, kernel, group, generator):
    """Append one random token per row; returns its query [B, Hq, 1, D] and its position."""
    batch, heads, _, dim = store.ring_k.shape
    k, v = torch.randn(2, batch, heads, 1, dim, generator=generator).to(DEVICE, DTYPE)
    q = torch.randn(batch, 1, heads * group, dim, generator=generator).to(DEVICE, DTYPE).transpose(1, 2)
    return q, store.append(k, v, write=kernel.write)


def check_steps(store, group, steps, kernel, seed=0):
    """A few steps past moves out of the window, each against the loops over rows and heads, over poisoned memory."""
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        q, position = step_of(store, kernel, group, generator)
        poison(store)
        got = kernel.attend(store, q, position, 0.3)
        # labels are rounded in the cache's own precision
        want = naive.attend(store, q if store.reads.ranking.bits < 16 else q.double(), position, 0.3).double()
        assert not got.isnan().any()
        torch.testing.assert_close(got.double(), want, **CLOSE)
        assert not kernel._done.any()
        store.flush(kernel.move)
        if isinstance(store.reads.ranking.bounds, Bounds):
            check_bounds(store)


def check_bounds(store):
    """The bounds that launches have kept up are those of all keys."""
    for row, head in np.ndindex(*store.prompt.length.shape):
        keys = torch.cat([part.read(row, head)[0] for part in (store.prompt, store.tail)])
        low, high = naive.bounds_of(store.reads.ranking.bounds, row, head)
        pages = keys.split(store.reads.ranking.page) if len(keys) else ()
        assert len(pages) == len(low)
        for page, least, most in zip(pages, low, high, strict=True):
            torch.testing.assert_close(least, page.amin(0), rtol=0, atol=0)
            torch.testing.assert_close(most, page.amax(0), rtol=0, atol=0)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.parametrize(
    ("kind", "counts", "dim", "group", "page"),
    [
        ("quest", [17, 32], 64, 1, 5),
        ("quest", [128, 77], 128, 2, 64),
        ("labels", [77, 128], 128, 2, 1),
        ("four bits", [0, 32, 17], 64, 1, 1),
    ],
)
def test_steps_are_those_of_the_loops(kind, counts, dim, group, page):
    reads = random_reads(kind, 29 + max(20, page), len(counts), dim, page)
    check_steps(store_of(reads, counts, dim, [110, 70], Sizes(5, 24, 2)), group, 3, Chosen(programs=2))


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=4, derandomize=True)
@given(
    st.sampled_from(["quest", "labels", "four bits"]),
    st.lists(st.integers(0, 64), min_size=1, max_size=2),
    st.integers(1, 5),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(1, 12)),
    st.integers(1, 20),
    st.integers(0, 200),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_steps_on_random_shapes(kind, counts, group, lengths, sizes, page, spare, programs, seed):
    """Spare: tokens that are read of the middle, which may be more than there are."""
    lengths, sizes = [max(n, sizes[0]) for n in lengths], Sizes(*sizes)
    reads = random_reads(kind, max(1, sizes.sink + sizes.window + spare), len(counts), 64, page, seed)
    check_steps(store_of(reads, counts, 64, lengths, sizes, seed), group, 3, Chosen(programs=programs), seed)


test_steps_on_many_random_shapes = at_length(test_steps_on_random_shapes, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["quest", "labels", "four bits"])
@pytest.mark.parametrize(
    ("counts", "dim", "group", "page"),
    [
        ([128] * 4, 128, 4, 16),
        ([0, 32, 64, 96], 128, 4, 16),
        ([77, 128, 16], 128, 7, 64),
        ([64, 17], 64, 1, 5),
        ([32, 80], 128, 16, 32),
    ],
)
def test_steps_on_the_device(kind, counts, dim, group, page):
    sizes = Sizes(16, 64, 32)
    store = store_of(random_reads(kind, 400, len(counts), dim, page), counts, dim, [3000, 1700, 700], sizes)
    kernel, generator, off, of_all = Chosen(), torch.Generator().manual_seed(1), 0, 0
    for _ in range(36):
        q, position = step_of(store, kernel, group, generator)
        poison(store)
        got = kernel.attend(store, q, position, 0.1).double()
        want = naive.attend(store, q.float(), position, 0.1).double()
        assert not got.isnan().any()
        wrong = ~torch.isclose(got, want, **CLOSE).all(-1)  # a page or token that ties with another may be chosen
        off, of_all = off + int(wrong.sum()), of_all + wrong.numel()
        store.flush(kernel.move)
        if kind == "quest":
            check_bounds(store)
    assert off <= 2e-3 * of_all


def unread(store, q):
    """Per row and KV head, the middle's tokens [n] bool that no query head of the group reads."""
    batch, heads = store.prompt.length.shape
    for row, head in np.ndindex(batch, heads):
        count = int(store.channels.count[row, head])
        index = store.channels.index[row, head, :count].long()
        k = torch.cat([part.read(row, head)[0] for part in (store.prompt, store.tail)]).float()
        group = q.shape[1] // heads
        kept = q[row, head * group : (head + 1) * group][..., index].float()
        yield row, head, ~naive.visible(store.reads, row, head, kept, k, index).any(0).any(0)


@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_what_is_not_chosen_is_not_read(kind):
    """NaN in every key and value that no query head has chosen changes no bit; labels are read of all."""
    store = store_of(random_reads(kind, 70, 2, 64, 8), [64, 40], 64, [180, 110], Sizes(8, 32, 2))
    kernel, generator = Chosen(programs=0 if ON_GPU else 4), torch.Generator().manual_seed(5)
    for _ in range(2):
        q, position = step_of(store, kernel, 2, generator)
        store.flush(kernel.move)
    before, hidden = kernel.attend(store, q, position, 0.3), 0
    for row, head, gone in unread(store, q):
        first, gone = 0, gone.cpu().numpy()
        labels = 0 if store.channels.first is None else int(store.channels.first[row, head])
        for part in (store.prompt, store.tail):
            k, v = part._regions(row, head)  # K [tokens, channels, 1]
            here = np.flatnonzero(gone[first : first + int(part.length[row, head])])
            k[here, labels:], v[here] = torch.nan, torch.nan
            first, hidden = first + int(part.length[row, head]), hidden + len(here)
    assert hidden > 100
    assert torch.equal(kernel.attend(store, q, position, 0.3), before)
    assert Plain().attend(store, q, position, 0.3).isnan().any()  # the plain form reads all and masks


@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_rows_that_are_reordered_keep_what_they_choose(kind):
    store = store_of(random_reads(kind, 72, 1, 64, 8), [40], 64, [130, 90], Sizes(8, 24, 2))
    kernel, generator = Chosen(programs=0 if ON_GPU else 2), torch.Generator().manual_seed(5)
    for _ in range(2):
        q, position = step_of(store, kernel, 2, generator)
        store.flush(kernel.move)
    before, rows = kernel.attend(store, q, position, 0.3), torch.tensor([1, 1, 0])
    store.select(rows)
    again = kernel.attend(store, q[rows], position[rows], 0.3)
    torch.testing.assert_close(again, before[rows])
    if not ON_GPU:
        check_steps(store, 2, 2, kernel)


def test_what_the_kernel_cannot_choose_is_said():
    dense = torch.ones(2, 64, dtype=torch.bool)
    packed = Middle(dense, reads=Quest(200, 16, 0), bits=Packing(4, 32))
    assert "does not unpack numbers" in why_not_middle(packed)
    assert why_not_middle(Middle(dense, reads=Quest(200, 16, 0))) is None
    assert why_not_middle(Middle(dense, dense)) is None
    for choice in ({"reads": Quest(200, 16, 0)}, {"eviction": HeavyHitters(4)}):
        assert "prunes some" in why_not_middle(Middle(dense, dense, **choice))
    if not ON_GPU:
        store = store_of(Quest(200, 16, 0), [64, 64], 64, [300], Sizes(8, 48, 8))
        q = torch.zeros(1, 4, 1, 64)
        assert isinstance(choose_backend("triton").choose(store, q), Chosen)
        store.reads.ranking = None  # a method of a user's own
        with pytest.raises(RuntimeError, match="the kernel cannot rank what Pages reads"):
            choose_backend("triton").choose(store, q)
        assert isinstance(choose_backend("auto").choose(store, q), Plain)


def test_what_triton_is_told_of_the_counts():
    """All 64 channels and 8 labels of them; the interpreter would not notice what divides neither."""
    store = store_of(random_reads("labels", 69, 2, 64), [64, 64], 64, [100], Sizes(5, 24, 4))
    kernel = Chosen(programs=0 if ON_GPU else 4)
    q, position = step_of(store, kernel, 1, torch.Generator().manual_seed(0))
    kernel.attend(store, q, position, 0.3)
    plan = kernel.plan(store)
    assert (plan.step, plan.label_step, plan.channels, plan.labels) == (16, 8, 64, 16)


def test_scores_that_outgrow_their_memory_move_on(monkeypatch):
    """A middle that grows past the scratch memory, and layers whose plans still point to the old one."""
    kernel, generator = Chosen(ChosenConfig(run=4), 0 if ON_GPU else 3), torch.Generator().manual_seed(2)
    monkeypatch.setattr(launch, "MOST_BLOCK", 32)
    stores = [store_of(random_reads("labels", 120, 1, 64), [64], 64, [n], Sizes(8, 48, 2)) for n in (200, 90)]
    for _ in range(3):
        for store in stores:
            q, position = step_of(store, kernel, 1, generator)
            got = kernel.attend(store, q, position, 0.3)
            want = naive.attend(store, q.double(), position, 0.3)
            torch.testing.assert_close(got.double(), want, **CLOSE)
            store.flush(kernel.move)


# Layers and whole replies


def layer_pair(reads, keep, lengths, sizes, seed):
    """Two compressed layers of the same prompt: the first runs in plain PyTorch, the second in the kernel."""
    generator = torch.Generator().manual_seed(seed)
    dim, width = keep.shape[-1], max(lengths)
    k, v = torch.randn(2, len(lengths), len(keep), width, dim, generator=generator).to(DEVICE, DTYPE)
    real = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).to(DEVICE)
    layers = []
    for choice in (Plain(), Only(Chosen(programs=4))):
        layers.append(CompressedLayer(Middle(keep, reads=reads), sizes, choice))
        layers[-1].compress(k, v, real)
    return layers


class Only:
    """A choice of one backend."""

    def __init__(self, backend):
        self.backend = backend

    def choose(self, *args):
        return self.backend


@pytest.mark.skipif(ON_GPU, reason="numbers of a later turn are the plain form's")
@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_a_later_turn_and_a_copy_go_on(kind):
    keep = torch.ones(2, 64, dtype=torch.bool)
    plain, fast = layer_pair(random_reads(kind, 90, 2, 64, 8), keep, [150, 90], Sizes(8, 40, 4), 3)
    generator = torch.Generator().manual_seed(4)
    for new in (1, 9, 1):
        k, v = torch.randn(2, 2, 2, new, 64, generator=generator)
        q = torch.randn(2, 4, new, 64, generator=generator)
        outs = []
        for layer in (plain, fast):
            layer.update(k, v)
            outs.append(layer.attend(q))
        torch.testing.assert_close(outs[1], outs[0], **CLOSE)
        fast = copy.deepcopy(fast)


def a_model(layers, heads, group, dim):
    """A random model whose attention is peaked enough that what is read changes its tokens."""
    return tiny_model(
        "llama", 1, vocab_size=211, hidden_size=128, intermediate_size=128, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads * group, num_key_value_heads=heads, initializer_range=0.2, eos_token_id=None,
        max_position_embeddings=4096, pad_token_id=0,
    ).to(DEVICE, DTYPE)  # fmt: skip


def replies(model, kind, kept, backend, new, generate=None):
    """Greedy tokens of a padded batch on a cache whose first layer reads all, and the cache."""
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    keep = torch.rand(heads, dim, generator=torch.Generator().manual_seed(3)) < kept
    reads = [None] * (layers > 1) + [random_reads(kind, 136, heads, dim, 8)] * (layers - (layers > 1))
    cache = compressed_cache(model, [Middle(keep, reads=one) for one in reads], 8, 48, 16, backend)
    if backend == "triton" and not ON_GPU:
        cache.choice.options = {"programs": 3}
    ids = torch.randint(3, 200, (2, 260), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = (torch.arange(260, device=DEVICE) >= torch.tensor([[0], [90]], device=DEVICE)).long()
    given = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    if generate is None:
        return model.generate(ids * mask, past_key_values=cache, **given)[:, 260:], cache
    return cache.generate(model, input_ids=ids * mask, **given)[:, 260:], cache


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="in float32, so that no rounding changes a token")
@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_a_thousand_tokens_are_those_of_the_plain_form(kind):
    model = a_model(1, 1, 2, 64)
    (want, plain), (got, fast) = (replies(model, kind, 0.7, backend, 1000) for backend in ("torch", "triton"))
    assert torch.equal(got, want)
    assert len(want.unique()) > 10
    assert fast.layers[0].store.tail.length.min() == plain.layers[0].store.tail.length.min() > 900
    assert isinstance(fast.layers[0].backend, Chosen)
    everything, _ = replies(model, None, 0.7, "torch", 1000)
    assert not torch.equal(want, everything)  # what is not read changes tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["quest", "labels", "four bits"])
def test_a_thousand_replayed_tokens_are_those_of_single_launches(kind):
    model = a_model(3, 2, 4, 64)
    (want, _), (got, cache) = (replies(model, kind, 0.7, "triton", 1050, generate) for generate in (None, "graph"))
    assert torch.equal(got, want)
    assert cache.steps.loop.captured
    assert cache.layers[1].store.tail.length.min() > 900


# The choice among scores


def highest(scores, most):
    """The numbers of the `most` highest of scores [n], in ascending order; of equals the first."""
    return scores.argsort(descending=True, stable=True)[:most].sort().values


def choices(scores, most, run, lines, width):
    """What `choose` writes for scores [8, total] of two query heads per KV head, [8, most], -1 where it writes nothing.

    run: tokens of a run, 0 = no runs. lines: that are held in registers, of `width` pages or runs. What lies past the
    last score is NaN or huge.
    """
    total, size = scores.shape[1], run or 8
    room, runs = (-(-n // 16) * 16 for n in (total, (total + size - 1) // size))
    table, heads = torch.zeros(4, FIELDS, dtype=torch.int64), torch.arange(4)
    padded = torch.full((8, room), torch.nan)
    padded[:, total:], padded[:, :total] = torch.tensor([torch.nan, 1e30]).repeat(room)[: room - total], scores
    best = torch.full((8, runs), 1e30)
    best[:, : -(-total // size)] = torch.stack([s.amax(-1) for s in scores.split(size, -1)], -1)
    table[:, Column.PROMPT] = total
    table[:, Column.SCORES], table[:, Column.STRIDE] = heads * 2 * room, room
    table[:, Column.BEST] = 8 * room + heads * 2 * runs
    table[:, Column.BEST_STRIDE] = runs
    cap = triton.next_power_of_2(max(1, most)) if run else 0
    chosen = torch.full((8 * (most + cap),), -1, dtype=torch.int32, device=DEVICE)
    words, tail = torch.cat([padded.flatten(), best.flatten()]).to(DEVICE), torch.zeros(4, dtype=torch.int64)
    choose.choose[(8,)](words, chosen, table.to(DEVICE), tail.to(DEVICE), most, GROUP=2, PER=1, RUN=size,
                        WIDTH=width, LINES=lines, CAP=cap, LAST=lines)  # fmt: skip
    return chosen[: 8 * most].view(8, most).cpu().long()


def check_choice(scores, most, run, lines, width=10):
    for found, of_row in zip(choices(scores, most, run, lines, width), scores, strict=True):
        assert torch.equal(found[: min(most, scores.shape[1])], highest(of_row, most))
        assert (found[scores.shape[1] :] == -1).all()


@pytest.mark.parametrize(
    ("total", "most", "run"),
    thinned(
        [(*case, run) for case in ((1, 1), (7, 40), (130, 40), (170, 150), (170, 7), (9, 0)) for run in (0, 8)],
        keep=(0, 3, 5, 6, 9, 11),
    ),
)
def test_the_choice_is_topks(total, most, run):
    """Of equals the first, each candidate once, in ascending order; past what a program holds, too."""
    generator = torch.Generator().manual_seed(total)
    scores = torch.randint(-6, 6, (8, total), generator=generator).float()
    scores[1], scores[2] = torch.randn(total, generator=generator), -torch.inf
    scores[3], scores[4] = 7.0, torch.randn(total, generator=generator).mul(9).exp()
    scores[5, ::3] = torch.inf
    scores[6] = torch.randn(total, generator=generator) * 1e-42
    scores[7] = 5 + torch.randint(-2, 3, (total,), generator=generator) * 1e-5  # equals near each other, far from some
    scores[7, ::40] = 1e30
    check_choice(scores, most, run, 8)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=4, derandomize=True)
@given(
    st.integers(1, 400),
    st.integers(0, 400),
    st.sampled_from([0, 4, 8, 16]),
    st.sampled_from([8, 64]),
    st.sampled_from([1, 3, 40, 10**6]),
    st.sampled_from([1e-30, 1.0, 1e6]),
    st.integers(0, 999),
)
def test_the_choice_on_random_scores(total, most, run, lines, different, scale, seed):
    """From scores that are all equal to scores that all differ, by little or much."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-different, different + 1, (8, total), generator=generator) / different * scale
    scores[:4] = scores[:4] ** 3 + 2 * scale
    check_choice(scores, most, run, lines)


test_the_choice_on_many_random_scores = at_length(test_the_choice_on_random_scores, 60)


@pytest.mark.parametrize("candidates", [1, 60, 2043, 4086, 5000, 8192, 16_384])
def test_a_middle_grows_by_a_sixteenth_before_candidates_are_read_again(candidates):
    """4,086 runs are a prompt of 32K, whose power of two is full after 80 decoded tokens."""
    lines, width = lines_held(candidates)
    assert lines * width > candidates * 17 / 16
    assert width % 2 == 0
    assert lines == 8 or lines * width < 2 * candidates


@pytest.mark.gpu
@pytest.mark.parametrize("run", [0, 4, 8, 16])
@pytest.mark.parametrize("different", [3, 2000, 10**9])
@pytest.mark.parametrize(("total", "most", "lines"), [(4016, 944, 512), (32_700, 944, 1024), (131_000, 4000, 2048)])
def test_the_choice_on_the_device(total, most, lines, different, run):
    scores = torch.randn(8, total, generator=torch.Generator().manual_seed(0))
    scores[:4] = (scores[:4] * different).round() / different
    check_choice(scores, most, run, lines)


# Which tokens of a middle stay


def check_stay(ranked, lengths, count):
    length = torch.tensor(lengths, device=DEVICE)
    found = choosing.heaviest(ranked, length, count)
    own = torch.arange(ranked.shape[-1], device=DEVICE) < length[..., None]
    wanted = largest(ranked.masked_fill(~own, -torch.inf), count) & own
    assert torch.equal(found & own, wanted)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@settings(max_examples=8, derandomize=True)
@given(st.integers(1, 90), st.integers(0, 100), st.sampled_from([1, 3, 1000]), st.integers(0, 999))
def test_any_ranks_with_ties(tokens, count, different, seed):
    """Ranks of both signs, many of them equal; heads of unequal length; padding that must not be read as a rank."""
    generator = torch.Generator().manual_seed(seed)
    ranked = torch.randint(-different, different + 1, (2, 3, tokens), generator=generator) / 7
    lengths = torch.randint(0, tokens + 1, (2, 3), generator=generator).tolist()
    for row in range(2):
        for head in range(3):
            ranked[row, head, lengths[row][head] :] = torch.nan
    check_stay(ranked, lengths, count)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
def test_blocks_and_strides(monkeypatch):
    monkeypatch.setattr(choosing, "BLOCK", 64)
    ranked = torch.randint(0, 9, (2, 1, 200), generator=torch.Generator().manual_seed(0)).float()
    check_stay(ranked.expand(-1, 2, -1), [[150, 200], [64, 0]], 70)
    check_stay(torch.tensor([[[0.0, -0.0, 0.0, 1e-45, -1e-45, torch.inf, -torch.inf]]]), [[7]], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [70, 600, 5000, 33_000])
@pytest.mark.parametrize("different", [5, 10**9])
def test_tokens_that_stay_on_the_device(tokens, different):
    ranked = (torch.randint(-different, different, (2, 4, tokens)) / 7).cuda()
    lengths = torch.randint(tokens // 2, tokens + 1, (2, 4)).tolist()
    for count in (0, 1, tokens // 3, tokens):
        check_stay(ranked, lengths, count)
