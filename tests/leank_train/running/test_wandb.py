"""Weights & Biases offline: every promised key is there, lineage joins runs, and no secret is written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from leank.eval.__main__ import run as evaluate
from leank.mask import ChannelMask
from leank.wandb_log import LoggerConfig, make_logger, mask_artifact, model_artifact, use
from leank_train.train import run as train
from scripts.wandb_workspace import PANELS, workspace
from tests import ROOT
from tests.helpers.composed import evaluation
from tests.helpers.tiny_run import VALIDATION, save_model, settings

SECRET = "a" * 8 + "5eC4e7" + "b" * 26  # as long as a key
METHODS = {"training": ["dense", "leank", "think", "static_norm", "lowest_frequencies", "random"],
           "eval": ["dense", "leank", "random"]}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a training run and of an evaluation of its mask, logged offline, with a key in the environment."""
    top = tmp_path_factory.mktemp("runs")
    model = save_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        steps = ["stage1.steps=2", "stage2.steps=1"]
        train(settings(model, *VALIDATION, "logger=wandb", *steps), top / "train")
        config = evaluation(
            f"model.name={model}", f"mask={top / 'train/mask.safetensors'}", "method=[dense,leank,random]",
            "benchmark.tasks=[niah_multikey_2,niah_single_1]", "benchmark.lengths=[320,384]", "benchmark.samples=1",
            "cache={sink: 4, window: 32, flush: 8}", "max_new_tokens=2", "logger=wandb", "name=sweep",
            "fidelity=2",
        )  # fmt: skip
        evaluate(config, top / "eval")
    return top


def inspect(folder, *arguments):
    (log,) = folder.glob("wandb/offline-run-*")
    line = [sys.executable, "-m", "wandb", "leet", "inspect", *arguments, "--json", str(log)]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def logged(folders):
    """run -> where -> keys, read back from the offline files."""
    out = {}
    for kind, folder in (("training", folders / "train"), ("eval", folders / "eval")):
        state = json.loads(inspect(folder, "--summary"))
        rows = [json.loads(line) for line in inspect(folder).splitlines()]
        history = {k.split(".")[0] for row in rows if row["type"] == "history" for k in row["history"]["item"]}
        out[kind] = {"summary": {*state["summary"]}, "config": {*state["config"]}, "history": history,
                     "state": state, "rows": rows}  # fmt: skip
    return out


def promised():
    """(run, where, key) of every line of docs/train/dashboards.md's table, METHOD filled in."""
    for line in (ROOT / "docs/train/dashboards.md").read_text().splitlines():
        found = re.fullmatch(r"\| (training|eval) \| (.*?) \| (history|summary|config) \| .* \|", line)
        for key in re.findall(r"`([^`]+)`", found[2]) if found else ():
            for method in METHODS[found[1]] if "METHOD" in key else [""]:
                if method == "dense" and key.startswith(("difference", "cache_share")):
                    continue
                yield found[1], found[3], key.replace("METHOD", method)


def test_every_promised_key_is_in_the_offline_run(logged):
    wanted = list(promised())
    places = {(kind, where) for kind in METHODS for where in ("history", "summary", "config")}
    assert {(kind, where) for kind, where, _ in wanted} == places
    missing = [(kind, where, key) for kind, where, key in wanted if key not in logged[kind][where]]
    assert missing == []


def test_steps_pictures_and_the_table_of_validation_are_logged(folders, logged):
    history = json.dumps([r["history"]["item"] for r in logged["training"]["rows"] if r["type"] == "history"])
    for key in ("distillation", "penalty", "alpha_mean", "tokens"):
        assert (history.count(f"stage1/{key}"), history.count(f"stage2/{key}")) == (2, 1)
    assert logged["training"]["state"]["config"]["pruning"]["align"] == 4
    (media,) = folders.glob("train/wandb/offline-run-*/files/media")
    plots = {file.stem for file in (folders / "train/plots").iterdir()}
    assert len(plots) == 4
    assert {file.stem.rsplit("_", 2)[0] for file in media.rglob("*.png")} == plots
    (table,) = media.rglob("*.table.json")
    assert [row[0] for row in json.loads(table.read_text())["data"]] == METHODS["training"]


def test_panels_of_the_workspace_show_logged_keys(logged):
    logged_keys = {key for kind in logged.values() for where in ("summary", "history") for key in kind[where]}
    panels = [keys for section in PANELS.values() for _, _, keys in section]
    assert {key for keys in panels for key in keys} <= logged_keys


def test_the_workspace_can_be_built():
    pytest.importorskip("wandb_workspaces")
    made = workspace("team/leank")
    assert (made.entity, made.project) == ("team", "leank")
    assert [len(section.panels) for section in made.sections] == [len(panels) for panels in PANELS.values()]


def test_groups_names_and_numbers(folders, logged):
    runs = {kind: next(r["run"] for r in found["rows"] if r["type"] == "run") for kind, found in logged.items()}
    assert (runs["training"]["run_group"], runs["training"]["display_name"]) == ("leank", "train")
    assert (runs["eval"]["run_group"], runs["eval"]["display_name"], runs["eval"]["job_type"]) == (
        "sweep", "eval", "eval",
    )  # fmt: skip
    summary = logged["eval"]["state"]["summary"]
    cells = json.loads((folders / "eval/summary.json").read_text())["runs"][0]["overall"]
    assert {c["method"]: c["score"] for c in cells} == {m: summary[f"score/{m}"] for m in METHODS["eval"]}
    (table,) = folders.glob("eval/wandb/offline-run-*/files/media/table/cells_*.json")
    assert len(json.loads(table.read_text())["data"]) == 3 * 2 * 2


def test_lineage_joins_training_and_evaluation(folders, logged):
    trained, evaluated = (logged[kind]["state"]["config"] for kind in ("training", "eval"))
    made = [r["artifact"] for r in logged["training"]["rows"] if r["type"] == "artifact"]
    (mask,) = (a for a in made if a["type"] == "mask")
    digest = json.loads((folders / "train/inputs.json").read_text())["config"]
    assert mask["name"] == evaluated["uses/mask"] == f"mask-{digest}"
    assert trained["uses/config"] == f"config-{digest}"
    assert trained["uses/model"] == evaluated["uses/model"]
    path = folders / "train/mask.safetensors"
    assert mask["digest"] == mask_artifact(path, ChannelMask.load(path)).digest  # the same version on a server


def test_online_a_used_artifact_is_marked():
    used, config = [], {}
    run = SimpleNamespace(config=SimpleNamespace(update=lambda d, **_: config.update(d)), offline=False,
                          use_artifact=used.append)  # fmt: skip
    artifact = model_artifact("/models/llama")
    use(run, artifact)
    assert used == [artifact]
    assert config == {"uses/model": "model-llama"}


def test_no_key_is_written(folders):
    files = [path for path in folders.rglob("*") if path.is_file()]
    assert len(files) > 30
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_auto_is_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    logger = make_logger(LoggerConfig(kind="wandb"), tmp_path / "ratio=0.5,seed=1")
    assert logger._offline
    assert logger._wandb_init["name"] == Path("ratio=0.5,seed=1").name
