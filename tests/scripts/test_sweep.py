"""Sweeps: members are judged by their files, those that failed run again as they were, tables from metrics alone."""

import csv
import json
import re
import statistics
from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image

from leank_train.settings import fingerprint
from scripts.sweep import __main__ as sweep
from scripts.sweep import report as sweep_report
from tests.helpers.report_rows import row as eval_row

CONF = str(files("leank.conf.train"))


def composed(overrides, **kwargs):
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", overrides=list(overrides), **kwargs)


def begin(folder, *overrides):
    """What Hydra writes as `python -m leank_train -m` begins in `folder`."""
    single = [o for o in overrides if "," not in o]
    found = composed([*single, f"hydra.sweep.dir='{folder}'"], return_hydra_config=True)
    OmegaConf.set_readonly(found.hydra, False)
    found.hydra.runtime.merge_with({"cwd": str(folder), "config_sources": []})
    found.hydra.overrides.task = [o for o in overrides if not o.startswith("hydra")]
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(found, folder / "multirun.yaml")


def member(folder, overrides, job="7_0", scores=None):
    """A member's folder as a run leaves it; with scores (method -> task -> recall) it is done."""
    config = composed(overrides, return_hydra_config=True)
    out = folder / config.hydra.job.override_dirname
    config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    (out / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(list(overrides)), out / ".hydra/overrides.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": {"job": {"id": job}}}), out / ".hydra/hydra.yaml")
    OmegaConf.save(config, out / "config.yaml", resolve=True)
    if scores is not None:
        (out / "metrics.json").write_text(json.dumps({"validation": {"recall": scores}}))
    return out


def test_members_are_the_product_of_command_line_and_sweep_file(tmp_path):
    begin(tmp_path, "+experiment=reference_demo", "+sweep=ratio", "seed=3,4,5")
    planned = sweep.plan(sweep.record(tmp_path))
    assert len(set(planned)) == len(planned) == 4 * 3
    seen = {(config.pruning.ratio, config.seed, config.name) for config in map(composed, planned)}
    assert seen == set(product((0.5, 0.6, 0.7, 0.8), (3, 4, 5), ["reference_demo"]))


@pytest.mark.parametrize("file", sorted(p.stem for p in Path(CONF).glob("sweep/*.yaml")))
def test_every_sweep_file_makes_members_that_differ(tmp_path, file):
    begin(tmp_path, "+experiment=reference_demo", f"+sweep={file}")
    planned = sweep.plan(sweep.record(tmp_path))
    assert len({fingerprint(composed(p)) for p in planned}) == len(planned) >= 4


def test_a_job_asks_for_what_the_trainer_uses():
    given = ["trainer=ddp", "trainer.devices=8", "trainer.num_nodes=2"]
    for launcher, gpus in (("slurm", 8), ("slurm_cpu", None)):
        found = composed([*given, f"hydra/launcher={launcher}"], return_hydra_config=True).hydra.launcher
        assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == (2, 8, gpus)
        assert found.additional_parameters == {"signal": "USR1@120", "requeue": True}


def test_status_judges_by_result_files_and_rerun_repeats_the_member(tmp_path, capsys):
    root = tmp_path / "a sweep, of $ratios"
    begin(root, "+experiment=reference_demo", "pruning.ratio=0.5,0.6", "seed=1,2", "hydra/launcher=basic")
    planned = sweep.plan(sweep.record(root))
    done = member(root, planned[0], "0", {"dense": {"a": 1.0}})
    failed = member(root, planned[2], "2")
    log = root / ".submitit/2/2_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("Training\r step 3\nleank_train: mask.align=5 does not divide\nsrun: error: task 0: Exited\n")
    assert [m.state for m in sweep.members(root)] == ["done", "not started", "failed", "not started"]
    with pytest.raises(SystemExit) as left:
        sweep.main(["status", str(root)])
    assert left.value.code == 1
    said = capsys.readouterr().out
    assert f"{log}: leank_train: mask.align=5 does not divide" in said
    assert "1 of 4 done, 3 to run again" in said

    for overrides, folder in ((planned[0], done), (planned[2], failed)):
        _, _, module, multirun, *arguments = sweep.command(root, overrides)
        assert (module, multirun) == ("leank_train", "--multirun")
        config = composed(arguments, return_hydra_config=True)
        assert Path(config.hydra.sweep.dir, config.hydra.sweep.subdir) == folder
        assert config.hydra.launcher._target_.endswith("BasicLauncher")
        assert fingerprint(composed(arguments)) == fingerprint(composed(overrides))


def test_a_slurm_job_in_its_queue_is_not_lost(tmp_path, monkeypatch):
    begin(tmp_path, "+experiment=reference_demo", "seed=1,2,3,4", "hydra/launcher=slurm_cpu")
    planned = sweep.plan(sweep.record(tmp_path))
    member(tmp_path, planned[0], "9_0")
    member(tmp_path, planned[1], "9_1")
    for number in range(4):
        (tmp_path / f".submitit/9_{number}").mkdir(parents=True)
    monkeypatch.setattr(sweep, "queue", lambda: {"9_0": "running", "9_2": "pending"})
    assert [m.state for m in sweep.members(tmp_path)] == ["running", "failed", "pending", "not started"]
    assert [m.lost for m in sweep.members(tmp_path)] == [False, True, False, True]


def test_a_folder_that_is_no_sweep(tmp_path):
    with pytest.raises(SystemExit, match=r"multirun.yaml does not exist; give the hydra.sweep.dir"):
        sweep.main(["status", str(tmp_path)])
    with pytest.raises(SystemExit, match="no member with scores"):
        sweep.main(["report", str(tmp_path)])


def cells(table):
    """The rows of a Markdown table, as lists."""
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines() if line.startswith("|")][2:]


WHOLE = """hydra:
  job: {config_name: train}
  runtime: {cwd: /, config_sources: []}
  launcher: {_target_: a.BasicLauncher}
  sweeper: {params: null}
  sweep: {dir: a, subdir: b}
  overrides: {task: ["seed=1"], hydra: []}
"""


@pytest.mark.parametrize(
    "written",
    ["", "- a", "3", "hydra: 3", "{unclosed", "hydra: {job: {}}", "hydra: {job: {config_name: train}}", "hydra: ${c}",
     b"\xa3\x80", WHOLE.replace("a.BasicLauncher", "3"), WHOLE.replace('"seed=1"', '"[[["'),
     WHOLE.replace('"seed=1"', "3")],
)  # fmt: skip
def test_a_damaged_record_is_one_line_that_names_it(tmp_path, written):
    file = tmp_path / "multirun.yaml"
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(SystemExit) as ended:
        sweep.main(["status", str(tmp_path)])
    assert f"sweep: {file} is not what Hydra wrote" in str(ended.value)
    assert len(str(ended.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text"), [("overrides", "{{{"), ("overrides", "3"), ("hydra", "x"), ("hydra", "hydra: 3")]
)
def test_a_members_damaged_record_is_named_too(tmp_path, name, text):
    (tmp_path / "multirun.yaml").write_text(WHOLE)
    own = tmp_path / "0/.hydra"
    own.mkdir(parents=True)
    (own / "overrides.yaml").write_text("- seed=1")
    (own / "hydra.yaml").write_text("hydra: {job: {id: 1}}")
    assert sweep.members(tmp_path)[0].state == "failed"
    (own / f"{name}.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"{name}.yaml is not what Hydra wrote"):
        sweep.members(tmp_path)


def test_no_rerun_waits_for_no_members(tmp_path):
    with pytest.raises(SystemExit, match="--at-once=0 must be at least 1"):
        sweep.main(["rerun", str(tmp_path), "--at-once", "0"])


@given(st.data())
def test_rows_are_means_over_seeds(data):
    """Against statistics.mean and .stdev, over any scores and any order of them."""
    seeds, tasks, ratios = [1, 2, 5], ["a", "b"], [0.5, 0.7]
    number = st.floats(0, 100)
    table = {key: data.draw(number) for key in product(ratios, seeds, tasks)}
    scores = [
        sweep_report.MemberScore((("pruning.ratio", r),), s, "validation", "leank", t, x)
        for (r, s, t), x in table.items()
    ]
    found = sweep_report.rows(data.draw(st.permutations(scores)), tasks)
    assert {(row.method, row.settings[0][1], row.seeds) for row in found} == {("leank", r, 3) for r in ratios}
    for row in found:
        ratio = row.settings[0][1]
        values = {t: [table[ratio, s, t] for s in seeds] for t in tasks}
        values["average"] = [sum(pair) / 2 for pair in zip(values["a"], values["b"], strict=True)]
        for name, (mean, deviation) in row.cells.items():
            assert mean == pytest.approx(statistics.mean(values[name]), abs=1e-9)
            assert deviation == pytest.approx(statistics.stdev(values[name]), abs=1e-6)


def test_a_task_that_a_seed_lacks_has_no_cell():
    made = [sweep_report.MemberScore((), s, "validation", "leank", t, 50.0) for s, t in ((1, "a"), (1, "b"), (2, "a"))]
    (row,) = sweep_report.rows(made, ["a", "b"])
    assert row.cells == {"a": (50.0, 0.0)}


def test_report_of_a_sweep_over_ratios_and_lambda(tmp_path):
    scores = {}
    for i, (ratio, lam, seed) in enumerate(product((0.5, 0.8), (0.04, 0.1), (1, 2))):
        leank = {
            "x": 90 - 40 * (ratio == 0.8) - 10 * seed,
            "y": 100 * lam,
            "average": -1,
        }  # the average is computed anew
        dense = {"x": 95 + seed, "y": 100.0, "average": -1}
        scores[ratio, lam, seed] = leank
        overrides = ["+experiment=reference_demo", f"pruning.ratio={ratio}", f"stage1.lam={lam}", f"seed={seed}"]
        out = member(tmp_path, overrides, f"7_{i}", {"dense": dense, "leank": leank})
    member(tmp_path, ["+experiment=reference_demo", "pruning.ratio=0.9"])  # failed: counts nowhere
    row = eval_row("leank", "0", 0.25, "vt", 1024)
    (out / "eval").mkdir()
    (out / "eval/results.jsonl").write_text(json.dumps(row) + "\n")

    written = {file.name: file for file in sweep_report.write_report(tmp_path)}
    assert set(written) == {"scores.csv", "report.md", "figure4_validation.png", f"figure4_{row['benchmark']}.png"}
    with written["scores.csv"].open() as file:
        kept = [r for r in csv.DictReader(file) if r["method"] == "leank" and r["source"] == "validation"]
    assert {
        (float(r["pruning.ratio"]), float(r["stage1.lam"]), int(r["seed"]), r["task"]): float(r["score"]) for r in kept
    } == {(*key, task): float(values[task]) for key, values in scores.items() for task in ("x", "y")}
    with Image.open(written["figure4_validation.png"]) as image:
        assert len(image.convert("RGB").getcolors(2**20)) > 4

    text = written["report.md"].read_text()
    own, other = text.split(f"# {row['benchmark']}: ")
    lam = own[own.index("## Table 15") : own.index("## Tables 9")]
    assert "Table 16" not in text
    assert cells(lam) == [
        ["dense", "", "", "2", "96.5 ± 0.7", "100.0 ± 0.0", "98.2 ± 0.4"],
        ["leank", "0.5", "0.04", "2", "75.0 ± 7.1", "4.0 ± 0.0", "39.5 ± 3.5"],
        ["leank", "0.5", "0.1", "2", "75.0 ± 7.1", "10.0 ± 0.0", "42.5 ± 3.5"],
        ["leank", "0.8", "0.04", "2", "35.0 ± 7.1", "4.0 ± 0.0", "19.5 ± 3.5"],
        ["leank", "0.8", "0.1", "2", "35.0 ± 7.1", "10.0 ± 0.0", "22.5 ± 3.5"],
    ]
    assert "| leank | 0.8 | 0.1 | 1 | 25.0 | 25.0 |" in " ".join(other.split())
    assert "vt 1024" in other


def test_training_tasks_and_the_second_stage_have_tables(tmp_path):
    for data, steps in product(("paper", "duo"), (0, 5)):
        scores = {"leank": {"x": 10.0 + steps}}
        member(tmp_path, [f"data={data}", f"stage2.steps={steps}"], scores=scores)
    sweep_report.write_report(tmp_path)
    text = (tmp_path / "report/report.md").read_text()
    assert "figure4" not in text
    tables = text.split("## ")
    assert [t.split(":")[0] for t in tables[1:]] == ["Table 16", "Tables 12 and 22", "Tables 9 and 23"]
    assert [row[1:3] for row in cells(tables[2])] == [
        ["kv:1 multivalue:1", "0"], ["kv:1 multivalue:1", "5"], ["passkey:1", "0"], ["passkey:1", "5"],
    ]  # fmt: skip


def test_two_members_of_the_same_settings_are_not_averaged(tmp_path):
    for place in ("one", "two"):
        member(tmp_path / place, ["seed=1"], scores={"leank": {"x": 1.0}})
    with pytest.raises(SystemExit, match="have the same settings and seed; remove one of them"):
        sweep.main(["report", str(tmp_path)])
