"""The naive head's reads and evictions, and a layer in plain PyTorch, step by step."""

import functools

import pytest
import torch

from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.naive import Head, Rules
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.reads.double_sparsity import Labels
from tests.oracles.attention import attention
from tests.oracles.cache_attention import highest

HEADS, DIM, GROUP, SIZES = 2, 8, 3, (2, 5, 3)


def by_labels(labels, most, q, k):
    return highest(q[:, labels] @ k[:, labels].T, most)


def test_a_prompt_reads_all_that_came_before_it():
    """Whole, whatever the rules are: beside dense attention with a soft cap and an extra logit."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 12, DIM, generator=generator, dtype=torch.float64)
    q = 2 * torch.randn(GROUP, 12, DIM, generator=generator, dtype=torch.float64)
    head, beyond = Head(Rules(*SIZES, torch.arange(DIM) < 3)), (5.0, torch.randn(GROUP, generator=generator).double())
    found = []
    for at in range(12):
        head.append(k[at], v[at])
        found.append(head.attend(q[:, at], 0.5, *beyond))
        head.flush()
    want = attention(q[None], k[None, None], v[None, None], 0.5, None, *beyond)[0]
    torch.testing.assert_close(torch.stack(found, 1), want)


@pytest.mark.parametrize("prompt", [1, 7, 30])
@pytest.mark.parametrize("choice", ["reads", "stays"])
def test_a_layer_gives_what_its_naive_heads_give(choice, prompt):
    generator = torch.Generator().manual_seed(prompt)
    k, v = torch.randn(2, 1, HEADS, prompt + 25, DIM, generator=generator, dtype=torch.float64)
    q = 2 * torch.randn(1, HEADS * GROUP, prompt + 25, DIM, generator=generator, dtype=torch.float64)
    keep = torch.rand(HEADS, DIM, generator=generator) < 0.6
    labels, most = keep & (torch.arange(DIM) % 2 == 0), 4
    assert labels.any(1).all()
    if choice == "reads":
        middle = Middle(channels=keep, reads=Labels(labels, sum(SIZES[:2]) + most))
    else:
        middle = Middle(channels=keep, eviction=HeavyHitters(most))
    heads = []
    for own, label in zip(keep, labels, strict=True):
        reads = functools.partial(by_labels, label[own], most) if choice == "reads" else None
        stays = functools.partial(highest, most=most) if choice == "stays" else None
        heads.append(Head(Rules(*SIZES, own, reads=reads, stays=stays)))

    def step(at):
        found = []
        for h, head in enumerate(heads):
            head.append(k[0, h, at], v[0, h, at])
            found.append(head.attend(q[0, h * GROUP : (h + 1) * GROUP, at], 0.5))
            head.flush()
        return torch.cat(found)

    for at in range(prompt):
        step(at)
    scores = torch.tensor([[[token.score for token in head.window] for head in heads]])
    for head in heads:
        head.compress()
    layer = CompressedLayer(middle, Sizes(*SIZES), choose_backend("torch"))
    # the choice of the prompt's tokens is a method's, not the layer's
    held = torch.zeros(1, HEADS, prompt, dtype=torch.bool)
    for h, head in enumerate(heads):
        first = scores[0, h, SIZES[0] : max(SIZES[0], prompt - SIZES[1])]
        end = SIZES[0] + len(first)
        held[0, h, SIZES[0] : end] = highest(first, most) if choice == "stays" else True
        assert int(held[0, h].sum()) == len(head.middle)
    layer.lazy_initialization(k, v)
    layer.compress(k[:, :, :prompt], v[:, :, :prompt], tokens=held, scores=scores if choice == "stays" else None)
    for at in range(prompt, prompt + 25):
        layer.update(k[:, :, at : at + 1], v[:, :, at : at + 1])
        got = layer.attend(q[:, :, at : at + 1], scaling=0.5)[0, 0]
        torch.testing.assert_close(got, step(at), rtol=1e-5, atol=1e-5)
    assert all(len(head.middle) == most for head in heads) or choice == "reads"
