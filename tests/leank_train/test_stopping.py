"""Early stopping: when a stage ends, what it keeps, and that stops and ranks change nothing of it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank import backbone as backbones
from leank.data_gen.tasks import Mixture
from leank_train.data import RetrievalData, Steps
from leank_train.fitting import EarlyStop, best_look, first_look
from leank_train.running.recorder import Recorder
from leank_train.stages import PruningConfig, Stage, Stage1, Stage2, StageConfig
from leank_train.train import run
from tests.helpers.ranks import forked_ranks
from tests.helpers.tiny_run import alpha, at_step, killed, settings

RECIPE = [
    "stage1=steered", "stage2=kl", "stage1.steps=40", "stage2.steps=3", "stage1.lr=0.2",
    "stage1.patience=2", "stage1.heldout_every=2", "stage1.heldout_documents=2", "checkpoint_every=1",
]  # fmt: skip
FIRST = 24  # the wanted mean of 40 steps falls during so many


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    """A run that nothing but its patience has stopped."""
    out = tmp_path_factory.mktemp("run")
    run(settings(model_folder, *RECIPE), out)
    return out


def state(out, name="done"):
    return torch.load(out / f"checkpoints/stage1/{name}.ckpt", weights_only=True)


class Losses(Stage):
    """A stage whose held-out losses are given; its scores are the number of the step."""

    def __init__(self, losses):
        torch.nn.Module.__init__(self)
        self.losses, self.alpha = losses, torch.nn.Parameter(torch.zeros(1))

    def heldout(self, batches):
        return self.losses[int(self.alpha)]

    def log(self, *args, **kwargs):
        """Drop what Lightning would write: there is no trainer here."""


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5]), min_size=1, max_size=30), st.integers(1, 5))
def test_patience_ends_a_stage_that_gains_no_more(losses, patience):
    """It goes on until so many looks in a row are no better than the best before them."""
    stopper = EarlyStop(StageConfig(len(losses), 0.1, patience=patience, heldout_every=1))
    stopper.first = 0
    stage, taken = Losses(losses), 0
    for step in range(len(losses)):
        stage.alpha.data.fill_(step)
        trainer = SimpleNamespace(global_step=step, max_steps=len(losses), should_stop=False)
        stopper.on_train_batch_end(trainer, stage)
        taken += 1
        again = EarlyStop(stopper.config)
        again.load_state_dict(stopper.state_dict())
        assert again.over == stopper.over == trainer.should_stop
        if trainer.should_stop:
            break
    seen = losses[:taken]
    waits = [i for i in range(1, taken + 1) if i >= patience + 1 and min(losses[: i - patience]) <= min(losses[:i])]
    assert waits == ([taken] if stopper.over else [])
    assert best_look(stopper.looks) == (seen.index(min(seen)), min(seen))
    stopper.restore(stage)
    assert stage.alpha.item() == seen.index(min(seen))


def test_looks_begin_when_scores_have_fallen():
    assert first_look(StageConfig(2000, 0.02, lam="auto", patience=1)) == 1200
    assert first_look(StageConfig(2000, 0.02, lam=0.06, patience=1)) == 400
    assert first_look(StageConfig(3, 0.02, patience=1)) == 1


def test_a_run_ends_early_with_its_best_scores(finished, model_folder, tmp_path):
    done, metrics = state(finished), json.loads((finished / "metrics.json").read_text())
    looks, steps = done["record"]["looks"], [s["step"] for s in done["record"]["steps"]]
    assert [step for step, _ in looks] == list(range(FIRST, steps[-1] + 1, 2))
    assert steps[-1] < 40
    step, loss = best_look(looks)
    assert looks.index((step, loss)) == len(looks) - 3
    assert metrics["heldout"] == {"stage1": {"step": step, "loss": loss, "ended": steps[-1]}}

    patient = [*RECIPE, "stage1.patience=100", "stage2.steps=0"]  # goes on to the last step, and passes that one
    course, keep = {}, Recorder.on_train_batch_end

    def note(recorder, trainer, module, *args):
        course.setdefault(trainer.global_step, module.alpha.detach().clone())
        keep(recorder, trainer, module, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", note)
        run(settings(model_folder, *patient), tmp_path)
    assert torch.equal(done["alpha"], course[step])
    assert state(tmp_path)["record"]["looks"][: len(looks)] == looks
    assert len(course) == 40


def test_the_loss_is_that_of_the_deployed_mask(model_folder):
    """It is what stage 2 minimises when heads without channels drop their middle."""
    backbone = backbones.load(str(model_folder))
    mixture = Mixture({"multikey": 1}, backbone.tokenizer, 300, 400, questions=2)
    batches = RetrievalData(backbone, mixture).held_out(3)
    scores = torch.rand(backbone.shape, generator=torch.Generator().manual_seed(1))
    scores[0, 1] = 0  # a head without channels
    pruning = PruningConfig(0.7, align=4, sink=4, window=32)
    for objective in ("kl", "l2"):
        one = Stage1(backbone, StageConfig(1, 0.1, objective=objective), pruning, scores)
        two = Stage2(backbone, StageConfig(1, 0.1, objective=objective, empty_heads="drop"), pruning, scores)
        assert (one.mask().channels_per_head == 0).any()
        one.trainer = SimpleNamespace(world_size=1)
        wanted = [float(two.distillation(batch).detach()) for batch in batches]
        assert one.heldout(batches) == pytest.approx(sum(wanted) / 3, rel=1e-6)


def test_no_step_trains_on_held_out_documents(model_folder):
    backbone = backbones.load(str(model_folder))
    mixture = Mixture({"multikey": 1}, backbone.tokenizer, 300, 400, per_length=2)
    data = RetrievalData(backbone, mixture, documents=2)
    assert len(data.held_out(5)) == 3
    held_out = [batch.documents.ids for batch in data.held_out(4)]
    trained = [Steps(backbone, mixture, 2, 0, 1)[i].documents.ids for i in range(2)]
    assert not any(torch.equal(one, other) for one in held_out for other in trained)
    ranks = []
    for rank in range(2):
        one = RetrievalData(backbone, mixture)
        one.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        ranks.append([batch.documents.ids for batch in one.held_out(4)])
    assert [len(found) for found in ranks] == [2, 2]
    together = [ids[0].tolist() for found in ranks for ids in found]
    assert len({tuple(ids) for ids in together}) == 4


def test_held_out_documents_lie_on_the_device_of_the_stage(model_folder):
    backbone = backbones.load(str(model_folder))
    data = RetrievalData(backbone, Mixture({"multikey": 1}, backbone.tokenizer, 300, 400))
    stop = EarlyStop(StageConfig(10, 0.1, patience=1))
    stop.on_train_start(SimpleNamespace(datamodule=data), SimpleNamespace(device=torch.device("meta")))
    rows = [part for batch in stop._batches for part in (batch.documents, batch.prompts, batch.answers)]
    assert rows
    assert {part.ids.device.type for part in rows} == {"meta"}


def test_killed_and_started_again(finished, model_folder, tmp_path):
    out = tmp_path / "run"

    def work():
        at_step(FIRST + 2)
        run(settings(model_folder, *RECIPE), out)

    assert killed(work)
    run(settings(model_folder, *RECIPE), out)
    assert torch.equal(alpha(out), alpha(finished))
    assert state(out)["record"]["looks"] == state(finished)["record"]["looks"]
    assert state(out)["record"]["steps"] == state(finished)["record"]["steps"]


def test_a_stage_that_had_ended_takes_no_step_more(finished, model_folder, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for file in (out / "checkpoints/stage1/done.ckpt", out / "mask.safetensors"):
        file.unlink()
    shutil.rmtree(out / "checkpoints/stage2")
    before = Stage.training_step

    def only_stage2(stage, *args):
        assert isinstance(stage, Stage2)
        return before(stage, *args)

    monkeypatch.setattr(Stage, "training_step", only_stage2)
    run(settings(model_folder, *RECIPE), out)
    assert torch.equal(alpha(out), alpha(finished))


def test_ranks_stop_where_one_process_stops(model_folder, tmp_path):
    recipe = [*RECIPE, "model.dtype=float64", "stage1.steps=12", "stage1.heldout_every=1"]
    output = forked_ranks(model_folder, tmp_path, "ranks", *recipe)
    run(settings(model_folder, *recipe, "data.documents=2"), tmp_path / "one")
    ours, theirs = (state(tmp_path / name)["record"]["looks"] for name in ("ranks", "one"))
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-3)
    assert output.count("stage1 ended at step") == 1
