"""The folder of a run: one training at a time, damaged checkpoints refused by name, runs that learn nothing refused."""

import os
import re
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank.data_gen import haystack
from leank.files import Lock
from leank.mask import ChannelMask
from leank.tensor_files import read_checkpoint, write_checkpoint
from leank.typed import BadConfig
from leank_train import run_folder
from leank_train.running import parallel
from leank_train.running.recorder import Recorder
from leank_train.settings import check, fingerprint, plain
from leank_train.stages import Stage
from leank_train.train import run
from tests.helpers.tiny_run import die_at_file, killed, save_model, settings

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


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("done", {"of": ["stage1", "x"]}, "is of another stage or of another config; remove it, and the stage"),
        ("done", {"alpha": torch.ones(1)}, r"holds what no stage leaves .*shape \[1\].*; remove it"),
        ("done", {"alpha": "x"}, "holds what no stage leaves"),
        ("done", {"record": {}}, r"holds what no stage leaves \(KeyError\('steps'\)\)"),
        ("last", {"of": ["stage1", "x"]}, "is of another stage or of another config; remove it to start the stage"),
        ("last", {"loops": None}, "is damaged or cut off: it has no loops; remove it to start the stage"),
        ("last", {"state_dict": {}}, r"it has no scores of the shape \[.*\]; remove it to start the stage"),
        ("last", {"state_dict": {"alpha": torch.ones(1)}}, r"it has no scores of the shape \[.*\]; remove it to start"),
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
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
