"""The main job with a context over several processes, and with weights in shares: the mask is that of one process."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from leank import backbone as backbones
from leank.data_gen.tasks import Mixture
from leank.typed import BadConfig
from leank_train.data import RetrievalData
from leank_train.forward.branching import prefill
from leank_train.running.parallel import shard
from leank_train.settings import check
from leank_train.train import run
from tests.conftest import tiny_model
from tests.helpers.branches import DOCUMENTS, batch, pad, step
from tests.helpers.ranks import SETTINGS, forked_ranks, record
from tests.helpers.tiny_run import alpha, settings

SHARES = [
    ("sequence_parallel", 2, ["trainer.sequence_parallel=2", "data.documents=2"], 2),  # uneven lengths, padded
    pytest.param("sequence_parallel", 4, ["trainer.sequence_parallel=2"], 2, marks=pytest.mark.slow),  # two groups
    pytest.param("fsdp", 2, [], 2, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, ["trainer.sequence_parallel=2"], 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("trainer", "devices", "extra", "documents"), SHARES)
def test_shares_learn_what_one_process_learns(model_folder, tmp_path, trainer, devices, extra, documents):
    variants = [
        *SETTINGS,
        "data.questions=2",
        "data.min_length=450",
        "data.max_length=500",
        "stage1.steps=3",
        "stage2.steps=2",
        "stage2.empty_heads=drop",
    ]
    forked_ranks(model_folder, tmp_path, "ranks", *variants, *extra, trainer=trainer, devices=devices)
    run(settings(model_folder, *variants, f"data.documents={documents}"), tmp_path / "one")
    for stage in ("stage1", "stage2"):
        for ours, theirs in zip(record(tmp_path / "ranks", stage), record(tmp_path / "one", stage), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-12)
    torch.testing.assert_close(alpha(tmp_path / "ranks"), alpha(tmp_path / "one"), rtol=1e-5, atol=1e-6)


def test_ranks_of_a_context_see_the_same_documents(model_folder):
    backbone = backbones.load(str(model_folder))
    mixture = Mixture({"multikey": 1, "kv": 1}, backbone.tokenizer, 300, 400, per_length=2)

    def first(rank, world, together):
        data = RetrievalData(backbone, mixture, together=together)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        return next(iter(data.train_dataloader())).documents.ids

    groups = [first(rank, 2, 1) for rank in range(2)]
    assert not torch.equal(*groups)
    assert all(torch.equal(first(rank, 4, 2), groups[rank // 2]) for rank in range(4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.sequence_parallel=0"], "trainer.sequence_parallel=0 must be"),
        (["trainer.sequence_parallel=2"], "trainer.sequence_parallel=2 needs several processes"),
        (["trainer.shard_weights=true"], "trainer.shard_weights=True needs several processes"),
        (["trainer=fsdp", "validation.samples=1"], "validation.samples=1: validation runs in one process"),
        (
            ["trainer=sequence_parallel", "+model.overrides.rope_parameters={rope_type: dynamic, factor: 2.0}"],
            "trainer.sequence_parallel=4: the RoPE of .*rope_type=dynamic",
        ),
        (["trainer.precision=bf16-true"], "trainer.precision='bf16-true' rounds the scores or the logits"),
        (["trainer.precision=16-mixed"], "trainer.precision='16-mixed' rounds the scores or the logits"),
        (["trainer.prefill_kernel=fast"], "trainer.prefill_kernel='fast' must be"),
        (
            ["trainer.prefill_kernel=flash_attn"],
            "trainer.prefill_kernel='flash_attn', but the package is not installed",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(model_folder, overrides, message):
    with pytest.raises(BadConfig, match=message):
        check(settings(model_folder, *overrides))


def test_processes_that_do_not_divide_are_named(model_folder, tmp_path):
    config = settings(model_folder, "trainer=sequence_parallel", "trainer.accelerator=cpu", "trainer.devices=2")
    with pytest.raises(ValueError, match=r"sequence_parallel=4 does not divide the 2 processes of trainer.devices=2"):
        run(config, tmp_path)


def one_of_two(rank, address):
    """A rank that has half the weights finds the hidden states and the gradient that whole ones give."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{address}", timedelta(seconds=60), rank=rank, world_size=2)
    model, whole = tiny_model("llama"), tiny_model("llama")
    for _ in range(2):  # the second stage asks again
        shard(model, torch.device("cpu"))
    documents = pad(batch()[0])
    ours, theirs = (step(m, prefill(m, documents, DOCUMENTS), 3, 6, "drop") for m in (model, whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    held = sum(p.to_local().numel() for p in model.base_model.parameters())  # after the passes: none is left whole
    assert held == sum(p.numel() for p in whole.base_model.parameters()) // 2
    dist.destroy_process_group()


def test_a_rank_holds_half_the_weights(tmp_path):
    mp.start_processes(one_of_two, (tmp_path / "address",), 2, start_method="fork")
