"""The offline dashboard: every run below a folder once, figure 4 from the runs' own numbers, one whole page."""

import json

import pytest
import torch
import wandb
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from wandb_workspaces.workspaces import Workspace

from leank.eval.report import summarise
from leank.eval.rows.results import Results
from leank.mask import ChannelMask
from scripts.dashboard.__main__ import against_ratio, main, set_loss_axis, training_table
from scripts.dashboard.runs import evaluation_points, evaluations, training_points, trainings
from tests.helpers.report_rows import Checker, grid, row

RECALL = {(0.5, 1): 90.0, (0.5, 2): 94.0, (0.8, 1): 70.0, (0.8, 2): 60.0}  # (ratio, seed) -> LeanK's average


def trained(folder, ratio, seed):
    """What a training run leaves, as far as the dashboard reads it; leank_train/test_wandb.py reads a real one."""
    folder.mkdir(parents=True)
    scores = torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(seed))
    mask = ChannelMask.from_scores(scores, ratio, 4, "exact")
    mask.save(folder / "mask.safetensors")
    config = {"name": "sweep", "seed": seed, "mask": {"ratio": ratio}, "model": {"name": "models/<tiny>"}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    averages = {"dense": 95.0, "leank": RECALL[ratio, seed], "think": 40.0 - seed}
    metrics = {"pruning_ratio": mask.pruning_ratio, "empty_heads": 0, "heads": 6, "alpha_mean": 0.4,
               "seconds": {"training": 3.0, "all": 4.0}, "config": "0123456789ab",
               "validation": {"recall": {m: {"vt": a, "average": a} for m, a in averages.items()}}}  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics))
    for stage in ("stage1", "stage2"):
        steps = [{"step": s, "distillation": 1 / s, "penalty": 0.1, "alpha_mean": 1 - s / 9} for s in range(1, 4)]
        (folder / "checkpoints" / stage).mkdir(parents=True)
        torch.save({"record": {"steps": steps}}, folder / "checkpoints" / stage / "done.ckpt")


@pytest.fixture
def outputs(tmp_path):
    for ratio, seed in RECALL:
        trained(tmp_path / f"sweep/mask.ratio={ratio},seed={seed}", ratio, seed)
    with Results(tmp_path / "eval/ruler") as results:
        for r in grid():
            results.append(r)
    (tmp_path / "eval/ruler/report.html").write_text("a report")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/metrics.json").write_text("{}")  # no mask yet
    return tmp_path


def test_every_run_is_found_once(outputs):
    names = [run.name for run in trainings([outputs, outputs / "sweep"])]
    assert len(names) == len(set(names)) == 4
    assert [folder.name for folder, _ in evaluations([outputs, outputs / "eval"])] == ["ruler"]
    lines = training_table(trainings([outputs])).cells.to_numpy().tolist()
    assert lines[0][:4] == ["sweep/mask.ratio=0.5,seed=1", "<tiny>", "0.5", "50.0%"]
    assert lines[0][-3:] == ["95.0", "90.0", "39.0"]


def test_points_of_figure_4_are_those_of_the_runs(outputs):
    points = training_points(trainings([outputs]))
    assert points["leank"] == {0.5: [90.0, 94.0], 0.8: [70.0, 60.0]}
    figure = against_ratio(points)
    containers = {c.get_label(): c for c in figure.axes[0].containers}
    assert containers["leank"].lines[0].get_xydata().tolist() == [[50, 92], [80, 65]]
    (bars,) = containers["leank"].lines[2]
    assert [path.vertices[:, 1].tolist() for path in bars.get_paths()] == [[90, 94], [60, 70]]


def test_points_of_evaluations_are_of_methods_that_choose_channels_alone():
    def config(**axes):
        return {**axes, "sink": 1}

    think = {"name": "think", "ratio": 0.6}
    rows = [
        row("dense", 0, 1.0),
        row("think", 0, 0.5, config=config(channels=think)),
        row("leank", 0, 0.75, config=config(channels={"name": "leank", "mask": "ab", "pruning_ratio": 0.69642})),
        row("both", 0, 0.25, config=config(channels=think, bits={"name": "kivi"})),
    ]
    assert evaluation_points(summarise(rows)["runs"]) == {
        "dense": {0.0: [100.0]}, "think": {0.6: [50.0]}, "leank": {0.696: [75.0]},
    }  # fmt: skip


def test_one_ratio_makes_no_figure():
    assert against_ratio({"dense": {0.0: [1.0]}, "leank": {0.7: [1.0, 2.0]}}) is None


@pytest.mark.parametrize(
    ("losses", "scale", "limits"),
    [
        ([1e-9, 0.06, 0.002], "log", (0.002 / 1.5, 0.09)),
        ([1.4, 1.5, 1.3], "linear", (0, 1.65)),
        ([0.0], "linear", (0, 1)),
    ],
)
def test_the_axis_of_a_loss_fits_it(losses, scale, limits):
    """A first step without loss stretches nothing, and a run that hardly moves fills its panel."""
    panel = Figure().add_subplot()
    panel.plot(losses)
    set_loss_axis(panel, losses)
    assert panel.get_yscale() == scale
    assert panel.get_ylim() == pytest.approx(limits)


def test_the_page_is_whole(outputs, capsys):
    main([str(outputs)])
    path = outputs / "dashboard.html"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.loads == ["eval/ruler/report.html"]  # a link to what lies beside it
    assert len(checker.ids) == len(set(checker.ids))
    assert "<tiny>" not in text
    assert text.count("<svg") == 4  # figure 4, losses, masks, and the evaluation's axes


def test_bad_arguments_say_what_to_give(tmp_path):
    with pytest.raises(SystemExit, match=r"neither mask\.safetensors with metrics\.json nor results\.jsonl"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no folder .*none; give those of runs"):
        main([str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="--wandb : give ENTITY/PROJECT"):
        main(["--wandb", ""])
    with pytest.raises(SystemExit, match="--wandb a/b/c: give ENTITY/PROJECT"):
        main(["--wandb", "a/b/c"])


def test_what_weights_and_biases_refuses_is_one_line(monkeypatch):
    def save(made):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(Workspace, "save", save)
    with pytest.raises(SystemExit, match=r"dashboard: --wandb team/leank: No API key configured\."):
        main(["--wandb", "team/leank"])
