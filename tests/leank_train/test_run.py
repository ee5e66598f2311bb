"""The main job end to end on a tiny model: what a run leaves, and that stops, seeds and workers change nothing else."""

import json
import random
import signal
import time

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM

from leank import backbone as backbones
from leank.eval.cache import compressed_cache
from leank.mask import ChannelMask
from leank_train.stages import Stage
from leank_train.train import run
from tests.helpers import forked
from tests.helpers.pictures import drawn
from tests.helpers.tiny_run import VALIDATION, alpha, at_step, die_at_file, killed, line_and_env, save_model, settings

PLOTS = {"losses", "alpha_histogram", "channels_per_head", "kept_per_frequency"}
METHODS = ["dense", "leank", "think", "static_norm", "lowest_frequencies", "random"]
STEPS = 6 + 4  # of both stages


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    """The directory of a run that nothing has stopped."""
    out = tmp_path_factory.mktemp("run")
    with drawn():
        run(settings(model_folder, *VALIDATION), out)
    return out


def test_run_directory(finished, model_folder):
    mask = ChannelMask.load(finished / "mask.safetensors")
    assert mask.keep.shape == (2, 2, 16)
    assert abs(mask.pruning_ratio - 0.7) <= 2 / 64  # half a block of 4 among 64 channels
    assert (mask.channels_per_head % 4 == 0).all()
    metadata = mask.metadata
    assert (metadata["model"], metadata["ratio"], metadata["alignment"], metadata["rounding"]) == (
        str(model_folder), 0.7, 4, "exact",
    )  # fmt: skip
    assert (metadata["sink"], metadata["window"], metadata["lengths"], metadata["seed"]) == (4, 32, [300, 400], 1)
    assert metadata["config"] == json.loads((finished / "inputs.json").read_text())["config"]
    assert set(metadata["versions"]) == {"torch", "lightning"}

    scores = load_file(finished / "alpha.safetensors")
    assert scores["alpha"].shape == scores["stage1"].shape == (2, 2, 16)
    assert not torch.equal(scores["alpha"], scores["stage1"])
    assert 0 <= scores["alpha"].min() < scores["alpha"].max() <= 1
    again = ChannelMask.from_scores(scores["alpha"], 0.7, 4, "exact")
    assert torch.equal(again.keep, mask.keep)
    alone = ChannelMask.load(finished / "stage1/mask_align4.safetensors")
    assert torch.equal(alone.keep, ChannelMask.from_scores(scores["stage1"], 0.7, 4, "exact").keep)

    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["pruning_ratio"] == mask.pruning_ratio
    assert metrics["heads"] == 4
    assert list(metrics["validation"]["recall"]) == METHODS
    assert set(metrics["validation"]["leank_minus"]) == {*METHODS} - {"leank"}
    assert set(metrics["distillation"]) == {"stage1", "stage2"}
    assert metrics["seconds"]["training"] > 0

    config = OmegaConf.load(finished / "config.yaml")
    assert config.stage1.steps == 6
    assert config.model.name == str(model_folder)
    table = (finished / "validation.md").read_text()
    assert all(f"| {m} " in table for m in METHODS)
    for name in ("last", "done"):
        assert {p.parent.name for p in finished.glob(f"checkpoints/*/{name}.ckpt")} == {"stage1", "stage2"}
    assert {p.stem for p in (finished / "plots").iterdir()} == PLOTS
    for picture in (finished / "plots").iterdir():
        with Image.open(picture) as image:
            assert image.format == "PNG"
            assert min(image.size) > 200
            assert len(image.convert("L").getcolors()) > 2  # something is drawn
    assert not [p for p in finished.rglob(".*") if p.is_file()]


def test_checkpoints_are_small_and_hold_no_weights_of_the_model(finished):
    state = torch.load(finished / "checkpoints/stage1/last.ckpt", weights_only=True)
    assert list(state["state_dict"]) == ["alpha"]
    done = torch.load(finished / "checkpoints/stage1/done.ckpt", weights_only=True)
    assert [s["step"] for s in done["record"]["steps"]] == [1, 2, 3, 4, 5, 6]


def test_the_same_command_again_does_no_step_and_gives_the_same(finished, model_folder, monkeypatch, drawn):
    files = ["mask.safetensors", "alpha.safetensors", "validation.md", *(f"plots/{p}.png" for p in PLOTS)]
    before = {f: (finished / f).read_bytes() for f in files}
    metrics = json.loads((finished / "metrics.json").read_text())

    def no_step(*args):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Stage, "training_step", no_step)
    again = run(settings(model_folder, *VALIDATION), finished)
    assert {f: (finished / f).read_bytes() for f in files} == before
    assert again["seconds"]["training"] == metrics["seconds"]["training"]
    for key in ("pruning_ratio", "distillation", "validation"):
        assert again[key] == metrics[key]


def test_the_seed_decides(finished, model_folder, tmp_path):
    run(settings(model_folder, "seed=2"), tmp_path)
    assert not torch.equal(alpha(tmp_path), alpha(finished))


def test_workers_change_nothing(finished, model_folder, tmp_path):
    run(settings(model_folder, "workers=1"), tmp_path)
    assert torch.equal(alpha(tmp_path), alpha(finished))


def test_a_model_with_attention_sinks(tmp_path):
    """GPT-OSS: sinks, experts, and a sliding window in every other layer, longer than the documents."""
    sizes = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512}
    folder, out = save_model(tmp_path / "model", GptOssForCausalLM, GptOssConfig, **sizes), tmp_path / "run"
    metrics = run(settings(folder, *VALIDATION, "stage1.steps=3", "stage2.steps=2"), out)
    assert list(metrics["validation"]["recall"]) == METHODS
    assert metrics["verdict"]["kl"]["leank"]["tasks"] > 0
    assert alpha(out).std() > 0.01
    mask, model = ChannelMask.load(out / "mask.safetensors"), backbones.load(str(folder)).model
    assert abs(mask.pruning_ratio - 0.7) <= 2 / 64
    caches = [compressed_cache(model, keep, 4, 32) for keep in (mask, None)]
    ids = torch.arange(3, 303)[None]
    pruned, whole = (model.generate(ids, past_key_values=cache, max_new_tokens=4) for cache in caches)
    assert pruned.shape == whole.shape
    assert caches[0].memory().total < caches[1].memory().total


def test_a_chat_template_fits_into_the_positions(tmp_path):
    """Documents as long as the model has positions leave room for the template."""
    folder = save_model(tmp_path / "model", max_position_embeddings=400)
    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = (
        "{{ bos_token }}system: You are asked about a text.\n"
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    words.save_pretrained(folder)
    longest = ["data.min_length=400", "validation.lengths=[400]", "stage1.steps=1", "stage2.steps=0"]
    metrics = run(settings(folder, *VALIDATION, *longest), tmp_path / "run")
    assert set(metrics["validation"]["recall"]) == set(METHODS)


ANY = random.randint(1, STEPS)
STOPS = {
    "any step": lambda: at_step(ANY),
    "last checkpoint": lambda: die_at_file("stage1/last.ckpt", "before"),
    "end of stage 1": lambda: die_at_file("stage1/done.ckpt", "before"),
    "between the stages": lambda: die_at_file("stage1/done.ckpt", "after"),
    "mask": lambda: die_at_file("run/mask.safetensors", "before"),
    "metrics": lambda: die_at_file("metrics.json", "before"),
}


SLOW = {"last checkpoint", "end of stage 1", "mask"}  # what a stop before or after them tests, too


@pytest.mark.parametrize("stop", [pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s for s in STOPS])
def test_killed_and_started_again(finished, model_folder, tmp_path, stop):
    out = tmp_path / "run"

    def work():
        STOPS[stop]()
        run(settings(model_folder), out)

    assert killed(work)
    assert not (out / "metrics.json").exists()
    assert (out / "mask.safetensors").exists() == (stop == "metrics")
    for checkpoint in out.glob("checkpoints/*/*.ckpt"):
        torch.load(checkpoint, weights_only=True)  # whole, or not there
    metrics = run(settings(model_folder), out)
    step = metrics["distillation"], json.loads((finished / "metrics.json").read_text())["distillation"]
    assert step[0] == step[1], stop
    assert torch.equal(alpha(out), alpha(finished)), ANY
    records = [[torch.load(at / f"checkpoints/stage{n}/done.ckpt", weights_only=True)["record"] for n in (1, 2)]
               for at in (out, finished)]  # fmt: skip
    assert [r["steps"] for r in records[0]] == [r["steps"] for r in records[1]]
    assert [r["histograms"] for r in records[0]] == [r["histograms"] for r in records[1]]


def test_command_line_killed_from_outside(finished, model_folder, tmp_path):
    cwd, (line, env) = tmp_path / "cwd", line_and_env(model_folder)
    cwd.mkdir()
    with (tmp_path / "log").open("w") as log:
        child = forked.start(line, cwd, env, log)
        while child.is_alive() and not (cwd / "here/checkpoints/stage1/last.ckpt").exists():
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert not (cwd / "here/metrics.json").exists()
        assert forked.run(line, cwd, env, log).returncode == 0, (tmp_path / "log").read_text()
    output = (tmp_path / "log").read_text()
    assert not [note for note in ("deprecated", "GPU available", "Tip:", "no effect") if note in output], output
    assert "mask      here/mask.safetensors" in output or str(cwd / "here/mask.safetensors") in output
    assert [p.name for p in cwd.iterdir()] == ["here"]  # and nothing beside hydra.run.dir
    assert torch.equal(alpha(cwd / "here"), alpha(finished))


def test_a_run_without_a_step_draws_no_curves(model_folder, tmp_path):
    more = ["stage1.steps=0", "stage2.steps=0", "validation.samples=0", "validation.heldout=0"]
    run(settings(model_folder, *more), tmp_path)
    assert {file.stem for file in (tmp_path / "plots").iterdir()} == PLOTS - {"losses", "alpha_histogram"}
