"""The choice among scores, and of tokens that stay, in Triton, against a stable sort: interpreted on a CPU, on the
device with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU

import triton  # isort: skip  (which the line above asks for)
from leank.eval.cache.attention.kernels import choose  # isort: skip
from leank.eval.cache.attention.choose import lines_held  # isort: skip
from leank.eval.cache.attention.ranking import FIELDS, Column
from leank.eval.cache.storage.eviction import largest
from leank.eval.cache.storage.kernels import choosing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


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


@pytest.mark.parametrize("run", [0, 8])
@pytest.mark.parametrize(("total", "most"), [(1, 1), (7, 40), (130, 40), (170, 150), (170, 7), (9, 0)])
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
@settings(max_examples=6, derandomize=True)
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
