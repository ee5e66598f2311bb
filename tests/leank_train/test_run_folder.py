"""The folder of a run: what is in it, what a run that was killed or told to stop leaves, and how it goes on."""

import io
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from leank import backbone as backbones
from leank.data_gen import haystack
from leank.data_gen.tasks import Mixture
from leank.files import Lock
from leank.mask import ChannelMask
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank.typed import BadConfig
from leank_train import run_folder
from leank_train.data import RetrievalData, Steps
from leank_train.recipes import check
from leank_train.recipes.paper import Stage2
from leank_train.running import parallel, progress
from leank_train.running.preempt import Signals
from leank_train.running.progress import Meter, StageProgress
from leank_train.running.recorder import Recorder, restoring
from leank_train.settings import fingerprint, plain
from leank_train.stages import Stage
from leank_train.train import run
from tests.helpers.ranks import two_ranks
from tests.helpers.thinned import thinned
from tests.helpers.tiny_run import VALIDATION, alpha, at_step, die_at_file, killed, save_model, settings

SHORT = ["stage1.steps=4", "stage2.steps=1", "checkpoint_every=1"]


@pytest.fixture(scope="module")
def whole(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run(settings(model_folder, *SHORT), out)
    return out


def damage(path, place=0.5):
    """Flip eight bytes in the middle."""
    content = bytearray(path.read_bytes())
    start = int(len(content) * place)
    content[start : start + 8] = (byte ^ 0xFF for byte in content[start : start + 8])
    path.write_bytes(content)


def test_a_damaged_last_checkpoint_is_refused_and_the_one_before_helps(model_folder, whole, tmp_path):
    def work():
        die_at_file("stage1/done.ckpt", "before")
        run(settings(model_folder, *SHORT), tmp_path)

    assert killed(work)
    last = tmp_path / "checkpoints/stage1/last.ckpt"
    previous = last.with_name("previous.ckpt")
    steps = [torch.load(file, weights_only=True)["global_step"] for file in (previous, last)]
    assert steps == [3, 4]
    damage(last)
    said = (
        f"{last} is damaged or cut off: .*; copy {previous} over it to go on .*, or remove it to start the stage anew"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=said) as error:
            run(settings(model_folder, *SHORT), tmp_path)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "mask.safetensors").exists()
    shutil.copy(previous, last)
    taken, keep = [], Recorder.on_train_batch_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", lambda *args: (taken.append(1), keep(*args)))
        run(settings(model_folder, *SHORT), tmp_path)
    assert len(taken) == 1 + 1  # one step of stage 1 again, and stage 2
    for name in ("mask.safetensors", "alpha.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_a_damaged_done_checkpoint_is_made_again_from_the_last(model_folder, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    done = tmp_path / "checkpoints/stage1/done.ckpt"
    done.write_bytes(done.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{done} is damaged or cut off: .*; remove it, and .* goes on from last.ckpt"):
        run(settings(model_folder, *SHORT), tmp_path)
    done.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "training_step", lambda *args: pytest.fail("a step was taken"))
        run(settings(model_folder, *SHORT), tmp_path)
    assert (tmp_path / "alpha.safetensors").read_bytes() == (whole / "alpha.safetensors").read_bytes()


@pytest.mark.parametrize("error", [AssertionError("a bug"), OSError(28, "full"), RuntimeError("out of memory")])
def test_what_is_no_fault_of_a_checkpoint_passes(error, tmp_path):
    with pytest.raises(type(error)) as raised, restoring(tmp_path, "remove it"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("done", {"of": ["stage1", "x"]}, "is of another stage or of another config; remove it, and the stage"),
        ("done", {"alpha": torch.ones(1)}, r"holds what no stage leaves \(RuntimeError.*; remove it"),
        (
            "done",
            {"alpha": torch.full((2, 2, 16), torch.nan)},
            r"no stage leaves \(RuntimeError: scores are not finite",
        ),
        (
            "done",
            {"alpha": torch.full((2, 2, 16), -1.0)},
            r"no stage leaves \(RuntimeError: .* not in \[0, 1\]\); remove",
        ),
        ("done", {"record": {}}, r"holds what no stage leaves \(ValidationError: .* Course steps Field required"),
        ("last", {"of": ["stage1", "x"]}, "is of another stage or of another config; remove it to start the stage"),
        ("last", {"loops": None}, "is damaged or cut off: it lacks one of state_dict, loops.*; remove it to start"),
        ("last", {"state_dict": {"alpha": torch.ones(1)}}, r"no stage leaves \(.* is invalid .*; remove it to start"),
        ("last", {"state_dict": {"alpha": torch.full((2, 2, 16), torch.nan)}}, "are not finite.*; remove it to start"),
        ("last", {"lr_schedulers": None}, r"no stage leaves \(TypeError.*; remove it to start"),
    ],
)
def test_a_checkpoint_that_the_stage_did_not_leave_is_refused(model_folder, whole, tmp_path, name, spoil, said):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"checkpoints/stage2/{name}.ckpt"
    write_checkpoint(file, read_checkpoint(file, "") | spoil)
    if name == "last":
        file.with_name("done.ckpt").unlink()
    with pytest.raises(ValueError, match=f"{file} .*{said}"):
        run(settings(model_folder, *SHORT), tmp_path)


def test_a_ratio_that_cannot_be_met_is_refused_before_a_step(model_folder, tmp_path, no_step):
    with pytest.raises(
        ValueError, match=r"ratio=0\.95 with align=16 would empty every head: \[2, 2, 16\] channels are 4"
    ):
        run(settings(model_folder, "pruning.ratio=0.95", "pruning.align=16"), tmp_path)
    for ratio, words in (("0.99", "empty every head"), ("0.01", "prune nothing")):  # not at the end of the run
        with pytest.raises(ValueError, match=rf"^extra_ratios={ratio} with align=4 would {words}"):
            run(settings(model_folder, f"extra_ratios=[0.5,{ratio}]"), tmp_path)


def test_a_ratio_that_is_missed_is_said(model_folder, tmp_path, caplog):
    run(settings(model_folder, "pruning.align=16", "stage1.steps=1", "stage2.steps=0"), tmp_path)
    assert f"{tmp_path}/mask.safetensors: it prunes 75.0% of the channels, not ratio=0.7" in caplog.text
    assert ChannelMask.load(tmp_path / "mask.safetensors").pruning_ratio == 0.75


def test_two_trainings_in_one_folder(model_folder, tmp_path, no_step):
    words = (
        rf"^{re.escape(str(tmp_path))} is being written by another training; wait for it, or set hydra\.run\.dir to a"
    )
    with Lock(tmp_path / "run.lock", "busy"), pytest.raises(BlockingIOError, match=words):
        run(settings(model_folder), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock"]


def test_processes_that_a_run_starts_hold_no_lock(tmp_path):
    lock = Lock(tmp_path / "lock", "busy")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b".")  # what runs after a fork has run
        time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        with pytest.raises(BlockingIOError, match="busy"):
            Lock(tmp_path / "lock", "busy")
        lock.close()
        Lock(tmp_path / "lock", "busy").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_requeued_job_waits_for_its_predecessor(model_folder, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        held = Lock(tmp_path / "run.lock", "busy")
        os.write(write, b".")
        time.sleep(0.3)
        os._exit(bool(held is None))
    os.read(read, 1)
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / "run.lock", "busy")
    run(settings(model_folder, *SHORT), tmp_path)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("leank.files.fcntl.flock", no_locks)
    with pytest.warns(UserWarning, match=r"lock cannot be locked .*; start no second run in its folder"):
        Lock(tmp_path / "lock", "busy").close()


TEXT = "\n".join(f"A river runs by mill {number}. A dog sleeps at the door of it." for number in range(40))
CHANGES = {
    "model": r"with model=\w{16}, and this run has model=\w{16}",
    "its shape": r"with model=\w{16}, and this run has model=\w{16}",
    "essays": r"with essays=\w{16}, and this run has essays=\w{16}",
    "tasks": r"with tasks=\['multikey', 'kv'\], and this run has tasks=\['kv', 'multikey'\]",
    "processes": "with documents_per_step=1, and this run has documents_per_step=2",
}


@pytest.mark.parametrize(
    ("change", "stage"),
    thinned([(change, stage) for change in CHANGES for stage in ("stage1", "stage2")], keep=(1, 2, 5, 6, 8, 9)),
)
def test_a_run_whose_inputs_have_changed_does_not_go_on(tmp_path, no_step, change, stage):
    """The settings are the same, and so is the fingerprint; the second stage would be trained on other inputs."""
    folder, essays, out = tmp_path / "model", tmp_path / "essays.txt", tmp_path / "run"
    save_model(folder)
    essays.write_text(TEXT)

    def begun(*tasks):
        config = settings(folder, *SHORT, f"data.essays={essays}")
        config.data.tasks = dict.fromkeys(tasks, 1)
        return config

    config, again = begun("multikey", "kv"), begun(*(("kv", "multikey") if change == "tasks" else ("multikey", "kv")))
    with run_folder.claimed(check(config), plain(config), out):
        at = out / "checkpoints" / stage / "done.ckpt"
        at.parent.mkdir(parents=True)
        at.touch()
    assert fingerprint(again) == fingerprint(config)
    if change == "model":
        weights = load_file(folder / "model.safetensors")
        save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    elif change == "its shape":
        save_model(folder, num_key_value_heads=1)
    elif change == "essays":
        essays.write_text(TEXT.replace("dog", "cat"))
        haystack.known_by.cache_clear()  # as in a new process
        haystack._read.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if change == "processes":
            patch.setattr(parallel, "role", lambda config: (True, 2))
        if change == "processes" and stage == "stage2":  # it takes no more documents, and may be validated elsewhere
            with run_folder.claimed(check(again), plain(again), out):
                return
        before = (out / "inputs.json").read_bytes()
        with pytest.raises(BadConfig, match=f"{out} was begun {CHANGES[change]}: set hydra.run.dir to a new folder"):
            run(again, out)
    assert (out / "inputs.json").read_bytes() == before


def test_inputs_of_a_run_without_checkpoints_are_replaced_and_damaged_ones_refused(model_folder, tmp_path):
    config = settings(model_folder, *SHORT)
    (tmp_path / "inputs.json").write_text("{")
    with run_folder.claimed(check(config), plain(config), tmp_path):
        (tmp_path / "checkpoints").mkdir()
    with run_folder.claimed(check(config), plain(config), tmp_path):
        pass
    for damaged in ("[", "[1]", "3"):
        (tmp_path / "inputs.json").write_text(damaged)
        with pytest.raises(BadConfig, match=r"inputs\.json is missing or damaged"):
            run(config, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", "x"), ("steps", [{}]), ("histograms", [(1, 2)]), ("times", [None]), ("seconds", math.nan),
        ("peak_bytes", 1.5),
    ],
)  # fmt: skip
def test_a_record_of_other_types_is_refused(whole, name, value):
    record = torch.load(whole / "checkpoints/stage1/done.ckpt", weights_only=True)["record"]
    with pytest.raises(ValidationError, match=f"Course\n{name}"):
        Recorder(1).load_state_dict(record | {name: value})


def test_workers_start_in_a_process_of_joblib(model_folder, monkeypatch):
    """There the default is a start method of loky's, with which a loader's workers cannot start."""
    loky = pytest.importorskip("joblib.externals.loky.backend.context")
    backbone = backbones.load(str(model_folder))
    data = RetrievalData(backbone, Mixture({"multikey": 1}, backbone.tokenizer, 300, 400), workers=1)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", loky.LokyContext())
    batches = iter(data.train_dataloader())
    assert torch.equal(next(batches).documents.ids, Steps(backbone, data.mixture, 1, 0, 1)[0].documents.ids)


NEVER = "checkpoint_every=1000"  # what is saved is saved by the signal


@pytest.fixture
def slurm_job(tmp_path, monkeypatch):
    """Pretend to be job 7 and return the file in which `scontrol` would find what it is asked."""
    asked = tmp_path / "asked"
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {asked}\n[ ! -e {tmp_path}/refuse ] || {{ echo disabled >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return asked


@pytest.fixture(scope="module")
def unbroken(model_folder, tmp_path_factory):
    """The scores of a run that nothing has stopped."""
    out = tmp_path_factory.mktemp("whole")
    run(settings(model_folder, NEVER), out)
    return alpha(out)


@pytest.mark.parametrize(
    ("step", "number"), thinned([(1, signal.SIGUSR1), (6, signal.SIGTERM), (8, signal.SIGINT)], keep=(1, 2))
)
def test_a_signal_saves_the_step_and_the_run_goes_on(model_folder, unbroken, tmp_path, monkeypatch, step, number):
    config, before = settings(model_folder, NEVER), [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with monkeypatch.context() as patch, Signals() as signals:
        patch.setattr(Recorder, "on_train_batch_end", Recorder.on_train_batch_end)  # is put back
        at_step(step, number)
        with pytest.raises(SystemExit) as stopped:
            run(config, tmp_path / "stopped", signals)
    assert stopped.value.code == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)] == before
    stage, done = ("stage1", step) if step <= 6 else ("stage2", step - 6)
    state = torch.load(tmp_path / f"stopped/checkpoints/{stage}/last.ckpt", weights_only=True)
    assert state["global_step"] == done
    assert not (tmp_path / "stopped/mask.safetensors").exists()
    monkeypatch.setattr(Recorder, "on_train_batch_end", Recorder.on_train_batch_end)
    taken = at_step(0)
    run(config, tmp_path / "stopped")
    assert len(taken) == 6 + 4 - step  # no step is done twice
    assert torch.equal(alpha(tmp_path / "stopped"), unbroken)


def test_a_signal_during_validation_ends_at_once(model_folder, tmp_path, monkeypatch):
    """Nothing is lost by it: the stages are done, and the other ranks have left."""
    config = settings(model_folder, *VALIDATION)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("leank_train.train.validate", lambda *args: os.kill(os.getpid(), signal.SIGUSR1))
    with Signals() as signals, pytest.raises(SystemExit):
        run(config, tmp_path, signals)
    assert (tmp_path / "mask.safetensors").exists()
    assert not (tmp_path / "metrics.json").exists()


def test_a_second_ctrl_c_does_not_wait_for_the_step(capsys):
    with Signals(kept=lambda: "3 steps are kept") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(SystemExit) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "leank_train: stopped by Ctrl-C; 3 steps are kept\n"


def test_ctrl_c_before_the_first_step_stops_at_once():
    with Signals() as signals:
        signals.leave_at_once()
        with pytest.raises(SystemExit) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stopped.value.code == 130


def leave(requeues, number=signal.SIGUSR1, first=True):
    signals = Signals(requeues)
    signals.received = number
    with pytest.raises(SystemExit) as stopped:
        signals.leave(first)
    return stopped.value.code


def test_only_the_first_rank_requeues_and_only_when_the_time_is_up(slurm_job, monkeypatch):
    assert leave(2) == 0
    assert slurm_job.read_text() == "requeue 7\n"
    assert leave(2, first=False) == 0  # the others end well, so that nothing kills the first before it has asked
    assert leave(2, signal.SIGTERM) == 128 + signal.SIGTERM  # scancel means it
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert leave(2) == leave(2, first=False) == 128 + signal.SIGUSR1
    assert slurm_job.read_text() == "requeue 7\n"


def test_a_refused_requeue_says_what_to_do(slurm_job, tmp_path):
    (tmp_path / "refuse").touch()
    signals = Signals(1)
    signals.received = signal.SIGUSR1
    with pytest.raises(RuntimeError, match=r"scontrol requeue 7: disabled; submit it with --requeue"):
        signals.leave(first=True)


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both(model_folder, tmp_path):
    process = two_ranks(model_folder, tmp_path, "out", "stage1.steps=2000", NEVER)
    while process.poll() is None and not list(tmp_path.glob("out/config.yaml")):
        time.sleep(0.05)
    for line in process.stdout:
        if "stage1:" in line:
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGTERM)  # not the first
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert (tmp_path / "out/checkpoints/stage1/last.ckpt").exists()


@pytest.mark.parametrize(("seconds", "between"), [(0.0, 3), (1e9, 0)])
def test_a_log_file_gets_a_line_now_and_then(monkeypatch, capsys, seconds, between):
    monkeypatch.setattr(progress, "BETWEEN_LINES", seconds)
    with Meter("stage1: learns", 12, done=9) as meter:
        for _ in range(3):
            meter.set_postfix({"loss": 0.123456}, refresh=False)
            meter.update()
    said = capsys.readouterr().out
    assert "\r" not in said
    lines = said.split("\n")
    assert lines[0] == "stage1: learns: 9 of 12 steps; 00:00 so far, about ? left"
    assert len([line for line in lines if line]) == between + 2
    assert lines[-3].startswith("stage1: learns: 12 of 12 steps; ")
    assert lines[-3].endswith(" left, loss=0.123")


def test_a_terminal_shows_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    with Meter("stage1: learns", 2) as meter:
        meter.update(2)
    assert "\rstage1: learns: 100%" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


@pytest.mark.parametrize("enabled", [False, True])
def test_only_the_first_process_reports_and_goes_on_where_it_stopped(capsys, enabled):
    trainer = SimpleNamespace(
        max_steps=5, global_step=3, progress_bar_metrics={"loss": 0.5, "v_num": "x"}, loggers=[]
    )  # fmt: skip
    bar = StageProgress("stage2")
    if not enabled:
        bar.disable()
    bar.on_train_start(trainer, Stage2)
    for trainer.global_step in (4, 5):
        bar.on_train_batch_end(trainer, None)
    bar.teardown()
    told = [line for line in capsys.readouterr().out.splitlines() if line]
    if not enabled:
        assert told == []
        return
    assert told[0].startswith(f"stage2: learns {Stage2.learned}: 3 of 5 steps;")
    assert told[-1].startswith(f"stage2: learns {Stage2.learned}: 5 of 5 steps;")
    assert told[-1].endswith("loss=0.5")
