"""Several processes: two ranks with a document each learn what one process with two documents learns."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank import backbone as backbones
from leank.data_gen.tasks import Mixture
from leank.mask import ChannelMask
from leank_train import data
from leank_train.data import Steps, collate
from leank_train.settings import check
from leank_train.train import run
from tests.helpers.ranks import SETTINGS, forked_ranks, record, two_ranks
from tests.helpers.tiny_run import alpha, settings


@pytest.mark.parametrize("reduction", ["official", pytest.param("paper", marks=pytest.mark.slow)])
def test_two_ranks_are_one_batch(model_folder, tmp_path, reduction):
    variants = [*SETTINGS, *(f"stage{i}.reduction={reduction}" for i in (1, 2))]
    if reduction == "official":
        output = forked_ranks(model_folder, tmp_path, "ranks", *variants)
    else:
        process = two_ranks(model_folder, tmp_path, "ranks", *variants)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert {p.name for p in tmp_path.iterdir()} - {"ranks.log"} == {"ranks"}  # no rank has written elsewhere
    assert output.count("mask      ") == 1

    config = settings(model_folder, *variants, "data.documents=2")
    run(config, tmp_path / "one")
    mixed = Mixture(
        dict(config.data.tasks), backbones.load(str(model_folder)).tokenizer, 300, 400, seed=6, per_length=2
    )
    assert len({mixed[i].task for i in range(10)}) == 2
    assert any(mixed[i].task != mixed[i + 1].task for i in range(0, 10, 2))  # ranks that differ in one step
    for stage in ("stage1", "stage2"):
        for ours, theirs in zip(record(tmp_path / "ranks", stage), record(tmp_path / "one", stage), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-12)
    torch.testing.assert_close(alpha(tmp_path / "ranks"), alpha(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    ranks, one = (ChannelMask.load(tmp_path / name / "mask.safetensors") for name in ("ranks", "one"))
    assert torch.equal(ranks.keep, one.keep)


@pytest.mark.parametrize("start", [0, 3])
def test_ranks_share_the_documents_of_one_process(model_folder, start):
    backbone = backbones.load(str(model_folder))
    mixed = Mixture({"multikey": 1, "kv": 1}, backbone.tokenizer, 300, 400, per_length=4)
    for item in range(2):
        first = (start + item) * 4
        whole = Steps(backbone, mixed, 4, 0, 1)[start + item].documents.ids
        assert torch.equal(whole, collate(backbone, [mixed[first + i] for i in range(4)]).documents.ids)
        for ranks, each in ((2, 2), (4, 1)):
            parts = [Steps(backbone, mixed, each, rank, ranks)[start + item] for rank in range(ranks)]
            documents = [part.documents for part in parts]
            rows = [row[:n] for part in documents for row, n in zip(part.ids, part.lengths, strict=True)]
            assert all(torch.equal(row, whole[i, : len(row)]) for i, row in enumerate(rows))
            assert len(rows) == 4


def test_a_prompt_ends_in_its_answer(model_folder):
    """What precedes it is the question, of any length; moving a batch moves its ids and leaves lengths on the host."""
    backbone = backbones.load(str(model_folder))
    mixed = Mixture({"multikey": 1, "kv": 1}, backbone.tokenizer, 500, 600, per_length=2, questions=2)
    made = collate(backbone, [mixed[0], mixed[1]])
    assert (len(made.documents.ids), len(made.prompts.ids)) == (2, 4)
    for prompt, answer, before in zip(made.prompts.ids, made.answers.ids, made.question_lengths, strict=True):
        tokens = answer[: len(prompt) - before]
        assert torch.equal(prompt[before : before + len(tokens)], tokens)
    moved = made.to("meta")
    for rows in (moved.documents, moved.prompts, moved.answers):
        assert (rows.ids.device.type, rows.lengths.device.type) == ("meta", "cpu")


class Numbers:
    """A mixture whose document number i is i."""

    def __getitem__(self, index):
        return index


@given(st.integers(1, 5), st.integers(0, 50), st.integers(1, 4))
def test_any_number_of_ranks_sees_the_same_documents(quarter, start, steps):
    """At the same documents a step: the same in every step, each once, none left out between steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "collate", lambda backbone, documents: documents)
        for world in (1, 2, 4):
            ranks = [Steps(None, Numbers(), 4 * quarter // world, rank, world) for rank in range(world)]
            for item in range(steps):
                seen = [number for rank in ranks for number in rank[start + item]]
                assert seen == [*range((start + item) * 4 * quarter, (start + item + 1) * 4 * quarter)]


def test_documents_do_not_depend_on_the_number_of_ranks(model_folder):
    """What number i is, its length included: the same at the same documents a step."""
    backbone = backbones.load(str(model_folder))
    made = [
        config.mixture(backbone, per_length=config.data.documents * world)
        for world in (1, 2, 4)
        for config in [check(settings(model_folder, "++data.tasks.kv=1", f"data.documents={4 // world}"))]
    ]
    for index in range(8):
        assert made[0][index] == made[1][index] == made[2][index]
    for mixed in made:
        assert len({mixed.length_of(i) for i in range(4)}) == 1  # so that no rank waits for a longer document


@pytest.mark.slow
def test_two_ranks_killed_and_started_again(model_folder, tmp_path):
    """The first process is killed, the second one follows; both go on from the same checkpoint."""
    process = two_ranks(model_folder, tmp_path, "killed", *SETTINGS, "stage1.steps=40")
    while process.poll() is None and not (tmp_path / "killed/checkpoints/stage1/last.ckpt").exists():
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)  # ends when the second process has closed its output, too
    assert not (tmp_path / "killed/mask.safetensors").exists()
    for out in ("killed", "whole"):
        process = two_ranks(model_folder, tmp_path, out, *SETTINGS, "stage1.steps=40")
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert torch.equal(alpha(tmp_path / "killed"), alpha(tmp_path / "whole"))
