"""Against a real Slurm, started here: sweeps, requeueing, several nodes, evaluation in parts.

Pretended nodes are daemons on one machine with more CPUs than it has; what Slurm does to jobs is the real thing.
"""

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from leank.eval.rows import key_of, read
from leank.mask import ChannelMask
from leank_train.train import run
from tests import ROOT
from tests.helpers.local_slurm import LocalSlurm, missing
from tests.helpers.ranks import SETTINGS
from tests.helpers.tiny_run import alpha, command, settings

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(missing() is not None, reason=f"no Slurm: {missing()}")]
slow = pytest.mark.slow
ROUNDS = 10


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, request):
    """Two nodes of eight CPUs, gone after the module's tests; where none can be started only -m slurm insists."""
    local = LocalSlurm(tmp_path_factory.mktemp("slurm"), nodes=2, cpus=8)
    try:
        local.start()
    except RuntimeError as reason:
        with suppress(RuntimeError):
            local.stop()
        if "slurm" in request.config.option.markexpr:
            raise
        pytest.skip(f"Slurm is installed, but does not start here: {reason}")
    yield local
    local.stop()


def environment(slurm):
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        **{"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        **slurm.env,
    }


def submit(slurm, cwd, *arguments):
    """sbatch; the job's number."""
    line = ["sbatch", "--parsable", *map(str, arguments)]
    found = subprocess.run(line, cwd=cwd, env=environment(slurm), capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def jobs(slurm, number):
    """Everything that Slurm says about a job, or about each of an array."""
    lines = slurm.call("scontrol", "show", "job", "-o", number).splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def until(fine, what, seconds=180):
    """Wait until `fine()`; a deadlock is a failure that says what never came."""
    deadline = time.time() + seconds
    while not fine():
        assert time.time() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


def finish(slurm, number, log=None):
    """Wait for the end of a job; all of an array must have completed."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    until(lambda: all(j["JobState"] in ended for j in jobs(slurm, number)), f"the end of job {number}", 400)
    states = {j["JobState"] for j in jobs(slurm, number)}
    assert states == {"COMPLETED"}, log and Path(log).read_text()


def test_jobs_arrays_nodes_and_sacct(slurm, tmp_path):
    """The Slurm that the others use: two nodes, arrays, and the states that a launcher asks for."""
    for program in ("sbatch", "srun"):
        assert slurm.call(program, "--version").startswith("slurm")
    found = subprocess.run(
        ["srun", "--nodes=2", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME"],
        env=environment(slurm), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert sorted(found.stdout.splitlines()) == ["0 node0", "1 node0", "2 node1", "3 node1"]
    number = submit(slurm, tmp_path, "--array=0-2", "-o", "%a.log", "--wrap", "test $SLURM_ARRAY_TASK_ID != 1")
    until(lambda: not slurm.call("squeue", "-h").strip(), "an empty queue", 30)
    lines = slurm.call("sacct", "-j", number, "-j", "999").splitlines()
    assert sorted(line.rsplit("|", 1)[0] for line in lines[1:]) == [
        f"{number}_0|COMPLETED", f"{number}_1|FAILED", f"{number}_2|COMPLETED"
    ]  # fmt: skip


def train(slurm, cwd, model, options, *extra):
    """sbatch scripts/cluster/train.sbatch on the tiny run; (job's number, its log)."""
    script = ROOT / "scripts/cluster/train.sbatch"
    settings = [*command(model), *SETTINGS, "trainer=ddp", "trainer.accelerator=cpu", *extra]
    number = submit(slurm, cwd, *options, script, *settings)
    return number, cwd / f"leank_train_{number}.log"


@slow
@pytest.mark.parametrize("tasks", [1, 2])
def test_two_nodes_are_one_process(slurm, model_folder, tmp_path, tasks):
    """Two ranks, and four: the scores of one process with as many documents a step, up to the order of additions."""
    options = ["--nodes=2", f"--ntasks-per-node={tasks}", "--cpus-per-task=1"]
    number, log = train(slurm, tmp_path, model_folder, options, "hydra.run.dir=nodes")
    finish(slurm, number, log)
    text = log.read_text()
    assert text.count(f"outputs   {tmp_path / 'nodes'}") == 1
    assert f"job {number}, start 1, on node[0-1]" in text
    run(settings(model_folder, *SETTINGS, f"data.documents={2 * tasks}"), tmp_path / "one")
    torch.testing.assert_close(alpha(tmp_path / "nodes"), alpha(tmp_path / "one"), rtol=1e-5, atol=1e-6)


@slow
def test_two_ranks_requeued_time_and_again(slurm, model_folder, tmp_path):
    """USR1 at any moment of training, ten times: never a deadlock, never a step lost."""
    long, options = ["stage1.steps=250", "checkpoint_every=1"], ["--ntasks-per-node=2"]
    number, log = train(slurm, tmp_path, model_folder, options, *long, "hydra.run.dir=stopped")
    last = tmp_path / "stopped/checkpoints/stage1/last.ckpt"
    for starts in range(1, ROUNDS + 1):
        until(lambda n=starts: log.exists() and log.read_text().count("outputs   ") == n, f"start {starts}")
        before = last.stat().st_mtime_ns if starts > 1 else 0
        until(lambda b=before: last.exists() and last.stat().st_mtime_ns > b, f"a step of start {starts}")
        time.sleep(random.uniform(0, 0.5))
        slurm.call("scancel", "--signal=USR1", number)
        until(lambda n=starts: int(jobs(slurm, number)[0]["Restarts"]) == n, f"requeueing number {starts}", 60)
    finish(slurm, number, log)
    assert log.read_text().count("goes back into the queue") == ROUNDS
    assert not (tmp_path / "stopped/checkpoints/stage1/last-v1.ckpt").exists()
    steps = torch.load(last.with_name("done.ckpt"), weights_only=True)["record"]["steps"]
    assert [s["step"] for s in steps] == [*range(1, 251)]

    number, log = train(slurm, tmp_path, model_folder, options, *long, "hydra.run.dir=whole")
    finish(slurm, number, log)
    assert torch.equal(alpha(tmp_path / "stopped"), alpha(tmp_path / "whole"))


def tool(slurm, cwd, *arguments):
    """python -m scripts.sweep."""
    line = [sys.executable, "-m", "scripts.sweep", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=environment(slurm), capture_output=True, text=True, timeout=400)


@slow
@pytest.mark.parametrize("trainer", ["fsdp", "sequence_parallel"])
def test_layouts_of_two_ranks_requeued_from_the_closed_form_on(slurm, model_folder, tmp_path, trainer):
    """USR1 after a document of the closed form, and after steps: the layout of a run that was left alone."""
    more = ["trainer.sequence_parallel=2"] if trainer == "sequence_parallel" else []
    layouts = ["stage1=steered", "stage1.steps=60", "stage2.steps=0", "pruning.bytes=0.3", "pruning.align=16",
               "pruning.compensation=mean", "data.calibration=12", "checkpoint_every=1", f"trainer={trainer}",
               "trainer.devices=2", *more]  # fmt: skip
    number, log = train(slurm, tmp_path, model_folder, ["--ntasks-per-node=2"], *layouts, "hydra.run.dir=stopped")
    kept = [tmp_path / "stopped/checkpoints" / name for name in ("closed_form.ckpt", "stage1/last.ckpt")]
    for starts, file in enumerate((kept[0], kept[0], kept[1]), 1):
        before = file.stat().st_mtime_ns if file.exists() else 0
        until(lambda f=file, b=before: f.exists() and f.stat().st_mtime_ns > b, f"{file.name} of start {starts}")
        slurm.call("scancel", "--signal=USR1", number)
        until(lambda n=starts: int(jobs(slurm, number)[0]["Restarts"]) == n, f"requeueing number {starts}", 60)
    finish(slurm, number, log)
    assert log.read_text().count("goes back into the queue") == 3
    number, log = train(slurm, tmp_path, model_folder, ["--ntasks-per-node=2"], *layouts, "hydra.run.dir=whole")
    finish(slurm, number, log)
    stopped, whole = (ChannelMask.load(tmp_path / name / "mask.safetensors") for name in ("stopped", "whole"))
    assert torch.equal(stopped.precision.key_bits, whole.precision.key_bits)
    assert torch.equal(stopped.mean_keys, whole.mean_keys)
    assert stopped.metadata["heldout"] == whole.metadata["heldout"]


@slow
def test_sweep_with_a_member_requeued_and_one_killed(slurm, model_folder, tmp_path):
    """Four ratios x two seeds from one command; USR1 to one member, SIGKILL to another, which is then run again."""
    experiment = tmp_path / "conf/train/experiment/tiny.yaml"
    experiment.parent.mkdir(parents=True)
    tiny = settings(model_folder, "stage1.steps=60", "checkpoint_every=1", "name=tiny")
    tree = OmegaConf.masked_copy(tiny, [key for key in tiny if key != "logger"])
    head = "# @package _global_\ndefaults: [{override /logger: none}, _self_]\n"
    experiment.write_text(head + OmegaConf.to_yaml(tree))
    line = [sys.executable, "-m", "leank_train", "--multirun", f"--config-dir={experiment.parents[1]}"]
    line += ["hydra/launcher=slurm_cpu", "+experiment=tiny", "pruning.ratio=.5,.6,.7,.8", "seed=1,2"]
    sweep = tmp_path / "outputs/sweeps/tiny"
    launcher = subprocess.Popen(
        line, cwd=tmp_path, env=environment(slurm), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    victims = {}
    for ratio, seed in (("0.5", 2), ("0.6", 1)):
        folder = sweep / f"pruning.ratio={ratio},seed={seed}"
        until((folder / "checkpoints/stage1/last.ckpt").exists, f"a step of {folder.name}")
        victims[folder] = OmegaConf.load(folder / ".hydra/hydra.yaml").hydra.job.id
    (requeued, first), (killed, second) = victims.items()
    slurm.call("scancel", "--signal=USR1", first)
    slurm.call("scancel", "--signal=KILL", second)
    output, _ = launcher.communicate(timeout=500)
    until(lambda: not slurm.call("squeue", "-h").strip(), "an empty queue", 300)
    assert launcher.returncode != 0, output  # it has seen that a member was lost
    assert not (killed / "metrics.json").exists()
    assert (requeued / "metrics.json").exists()
    logs = (sweep / f".submitit/{first}/{first}_0_log.out").read_text()
    assert logs.count(f"outputs   {requeued}") == 2
    assert "goes back into the queue" in logs

    found = tool(slurm, tmp_path, "status", sweep)
    assert "7 of 8 done, 1 to run again" in found.stdout, found
    assert found.returncode == 1
    found = tool(slurm, tmp_path, "rerun", sweep)
    assert "8 of 8 done, 0 to run again" in found.stdout, found
    assert found.returncode == 0
    assert {p.name for p in sweep.iterdir()} == {
        *(f"pruning.ratio={r},seed={s}" for r in (0.5, 0.6, 0.7, 0.8) for s in (1, 2)),
        *(".submitit", ".rerun", "multirun.yaml"),
    }
    for folder in (requeued, killed):
        config = OmegaConf.load(folder / "config.yaml")
        whole = tmp_path / "whole" / folder.name
        run(config, whole)
        assert torch.equal(alpha(folder), alpha(whole)), folder.name


@slow
def test_evaluation_in_parts(slurm, model_folder, tmp_path):
    settings = [
        f"model.name={model_folder}", "method=[dense,lowest_frequencies]", "benchmark.tasks=[niah_multikey_2]",
        "benchmark.lengths=[300,400]", "benchmark.samples=5", "cache={sink: 4, window: 32, flush: 8}",
        "max_new_tokens=4", "batch_size=2",
    ]  # fmt: skip
    script = ROOT / "scripts/cluster/eval.sbatch"
    number = submit(slurm, tmp_path, "--array=0-2", "--cpus-per-task=1", script, *settings, "hydra.run.dir=parts")
    finish(slurm, number, tmp_path / f"leank_eval_{number}_0.log")
    assert len(list((tmp_path / "parts").glob("results-*-of-3.jsonl"))) == 3
    report = submit(slurm, tmp_path, "-o", "report.log", "--wrap", f"{sys.executable} -m leank.eval report parts")
    finish(slurm, report, tmp_path / "report.log")
    whole = [sys.executable, "-m", "leank.eval", *settings, "hydra.run.dir=whole"]
    subprocess.run(whole, cwd=tmp_path, env=environment(slurm), check=True, capture_output=True)

    def rows(name):
        return {key_of(row): (row["score"], row["prediction"]) for row in read(tmp_path / name)}

    assert rows("parts") == rows("whole")
    assert len(rows("whole")) == 2 * 2 * 5
    before = {f: f.read_bytes() for f in (tmp_path / "parts").glob("results*")}
    again = submit(slurm, tmp_path, "--array=1", "--export=ALL,SHARDS=3", script, *settings, "hydra.run.dir=parts")
    finish(slurm, again, tmp_path / f"leank_eval_{again}_1.log")
    assert {f: f.read_bytes() for f in before} == before
    node = submit(slurm, tmp_path, "--cpus-per-task=2", "-o", "node.log", script, *settings, "devices=2",
                  "hydra.run.dir=node")  # fmt: skip
    finish(slurm, node, tmp_path / "node.log")
    assert len(list((tmp_path / "node").glob("results-*-of-2.jsonl"))) == 2
    assert (tmp_path / "node/report.html").exists()
    assert rows("node") == rows("whole")
