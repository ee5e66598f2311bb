"""Contexts in shares over processes: keys, hidden states, loss and the gradient of alpha are those of one process."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from leank_train.forward import fused, sequence_parallel
from leank_train.forward.branching import prefill
from leank_train.forward.sequence_parallel import block_attention, prefill_in_shares, share
from tests.conftest import tiny_model
from tests.helpers.branches import DOCUMENTS, batch, pad, step

ZONES = [(3, 6), (0, 1), (8, 30), (1, 5)]  # (sink, window); in the third no token is in the middle


def one_rank(rank, world, address, flash):
    if flash:  # the flash kernel reads what it can of these few keys, as it does on a GPU
        fused.FLASH_FROM, fused.flash_takes = 1, lambda q: True
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{address}", timedelta(seconds=60), rank=rank, world_size=world)
    for architecture, zones in (("llama", ZONES), ("qwen3", ZONES[:1])):
        model = tiny_model(architecture)
        documents, lengths = pad(batch()[0]), DOCUMENTS
        whole = prefill(model, documents, lengths)
        shared = prefill_in_shares(model, documents, lengths, dist.group.WORLD)
        columns = share(documents.shape[1], rank, world)
        real = columns < documents.shape[1]
        for ours, theirs in zip(shared.keys + shared.values, whole.keys + whole.values, strict=True):
            assert ours.shape[2] == len(columns) == 2 * -(-documents.shape[1] // (2 * world))
            for b, length in enumerate(lengths):
                inside = columns < length
                torch.testing.assert_close(ours[b, :, inside], theirs[b][:, columns[inside]])
        assert torch.equal(shared.k_positions[:, real], whole.k_positions[:, columns[real]])
        assert (shared.k_positions[:, ~real] == -1).all()
        for sink, window in zones:
            for empty_heads in ("drop", "zero"):
                ours, theirs = (step(model, p, sink, window, empty_heads) for p in (shared, whole))
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "flash"), [(2, False), (3, False), (2, True)])
def test_shares_are_one_process(world, flash, tmp_path):
    """Two documents of 23 and 17 tokens: the chunks of 2 and of 3 ranks end in padding, and a row ends in others."""
    mp.start_processes(one_rank, (world, tmp_path / "address", flash), world, start_method="fork")


@given(st.integers(1, 200), st.integers(1, 8))
def test_shares_are_disjoint_complete_and_balanced(tokens, world):
    shares = [share(tokens, rank, world).tolist() for rank in range(world)]
    every = sorted(column for columns in shares for column in columns)
    assert every == list(range(len(every)))
    assert 0 <= len(every) - tokens < 2 * world
    assert all(columns == sorted(columns) for columns in shares)
    work = {sum(column + 1 for column in columns) for columns in shares}  # keys that the rank's rows see
    assert len(work) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("device", "cudnn"), [("cpu", False), *(pytest.param("cuda", c, marks=pytest.mark.gpu) for c in (False, True))]
)
def test_block_attention_is_softmax_attention(monkeypatch, device, cudnn, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, 16, generator=generator)
        for h, n in ((4, 6), (2, 6 if causal else 9), (2, 6 if causal else 9))
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    monkeypatch.setitem(sequence_parallel.SCORES_AT_ONCE, "cpu", 100)  # two rows at a time
    logits = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.3
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    wanted = logits.softmax(-1) @ v.float().repeat_interleave(2, 1), logits.logsumexp(-1)
    for ours, theirs in zip(block_attention(q, k, v, 0.3, causal, cudnn), wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(
            ours, theirs, atol=2e-2 if device == "cuda" else 1e-6, rtol=1e-2 if device == "cuda" else 1e-5
        )
