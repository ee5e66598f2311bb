"""The wheel: what it puts at the top level, and that folders of a user's own shadow nothing of it."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile

import pytest

from tests import ROOT

LARGEST = 3 << 20  # bytes
PACKAGES = ("eval", "conf", "data_gen")  # linked into leank
START = "from {} import command_line; command_line()"
SHADOWS = (*PACKAGES, "scripts", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the tracked files, so that the checkout gets no build folder."""
    out = tmp_path_factory.mktemp("wheel")
    tree = out / "tree"
    tree.mkdir()
    names = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    subprocess.run(["tar", "cf", out / "tree.tar", "-T", "-"], cwd=ROOT, input=names, check=True)
    subprocess.run(["tar", "xf", out / "tree.tar"], cwd=tree, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree]
    subprocess.run(build, check=True)
    return next(out.glob("leank-*.whl"))


@pytest.fixture(scope="module")
def hostile(wheel, tmp_path_factory):
    """A folder with packages of the names of ours, and a function that runs Python there with the wheel installed."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("folder")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in SHADOWS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the {name} of the user')\n")

    def run(*arguments):
        env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'models'}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_top_level_is_ours_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (top,) = (name for name in archive.namelist() if name.endswith("/top_level.txt"))
        assert archive.read(top).decode().split() == ["leank", "leank_train"]
    assert wheel.stat().st_size < LARGEST


def test_every_file_of_the_packages_is_in_it(wheel):
    """Code, configurations and texts; the models' weights are a package of their own."""
    ours = ("leank", "leank_train", "models/masks", *PACKAGES)
    tracked = subprocess.check_output(["git", "ls-files", *ours], cwd=ROOT, text=True)
    kinds = (".py", ".cu", ".yaml", ".json", ".txt", ".safetensors", ".pth")
    left_out = re.compile(r"smollm2/.*_seed\d[23]\.")  # all seeds but one
    wanted = {name for name in tracked.split("\n") if name.endswith(kinds) and not left_out.search(name)}
    inside = {f"leank/{name}" if name.startswith(PACKAGES) else name.replace("models/", "leank/") for name in wanted}
    with zipfile.ZipFile(wheel) as archive:
        assert len(inside) > 300
        assert inside <= {*archive.namelist()}


def test_commands_show_their_help_beside_folders_of_the_same_names(hostile):
    """A script of the wheel has the working folder on its path, as `python -c` has."""
    assert "pruning" in hostile("-c", START.format("leank_train.__main__"), "--help")
    assert "benchmark" in hostile("-c", START.format("leank.eval.__main__"), "--help")
    hostile("-m", "leank.data_gen", "--task=passkey", "--length=1500", "--count=1", "--out=samples.jsonl")


def test_masks_of_the_reference_models_are_found_by_their_path_in_a_checkout(hostile):
    found = "from leank.shipped import located; print(located('models/reference/mask_70pct.safetensors'))"
    assert hostile("-c", found).strip() == str(ROOT / "models/leank_models/reference/mask_70pct.safetensors")


IN_EXTRAS = (
    "hydra", "omegaconf", "math_verify", "datasets", "pandas", "tabulate", "matplotlib", "rouge", "rouge_score",
    "lightning", "wandb", "PIL",
)  # what a plain installation does not have  # fmt: skip
GENERATE = """
from leank import ChannelMask, compressed_cache
from leank.backbone import load
from leank.shipped import resolve

lm = load("reference")
mask = ChannelMask.load(f"{resolve('reference')}/mask_70pct.safetensors")
inputs = lm.tokenizer("The grass is green. " * 60, return_tensors="pt")
cache = compressed_cache(lm.model, mask, sink=4, window=16)
reply = cache.generate(lm.model, **inputs, max_new_tokens=4)
print(reply.shape[1] - inputs["input_ids"].shape[1], cache.memory())
"""


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """A function that runs Python with the wheel and without the extras' libraries; it returns what comes out."""
    site = tmp_path_factory.mktemp("light")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({IN_EXTRAS}))\n")
    path = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'models'}", "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=site, env={**os.environ, **path}, capture_output=True, text=True
        )

    return run


def test_a_mask_is_loaded_and_generates_without_the_extras(light):
    done = light("-c", GENERATE)
    assert re.match(r"4 .* of dense", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("leank_train --help", "leank_train needs the extra train: pip install 'leank[train]'"),
        ("leank_train doctor reference", "leank_train needs the extra train: pip install 'leank[train]'"),
        ("leank.eval --help", "eval: leank.eval needs the extra eval: pip install 'leank[eval]'"),
        ("leank.eval report .", "eval: leank.eval.report needs the extra eval: pip install 'leank[eval]'"),
        ("leank.eval.papers --list", "leank.eval.papers needs the extra eval: pip install 'leank[eval]'"),
    ],
)
def test_a_command_says_which_extra_it_lacks(light, command, said):
    done = light("-m", *command.split())
    assert (done.returncode, done.stderr.strip()) == (1, said)


def test_a_function_says_which_extra_it_lacks(light):
    done = light("-c", "from leank.eval.metrics.text import rouge_l; rouge_l('a', 'a')")
    assert done.stderr.strip().endswith("MissingExtra: ROUGE needs the extra eval: pip install 'leank[eval]'")


@pytest.mark.slow
def test_a_fresh_environment_has_all_that_a_plain_installation_needs(wheel, tmp_path):
    """It installs from the package index, which takes minutes."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "models"), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([python, "-c", GENERATE], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert re.match(r"4 .* of dense", said.stdout)


@pytest.mark.slow
def test_an_evaluation_runs_beside_folders_of_the_same_names(hostile):
    hostile(
        "-m", "leank.eval", "model=reference", "benchmark=niah", "method=[dense,leank]",
        "mask=models/reference/mask_70pct.safetensors", "benchmark.lengths=[256]", "benchmark.count=1",
        "benchmark.depths=[50]", "cache={sink: 4, window: 32, flush: 32}", "hydra.run.dir=run",
    )  # fmt: skip
    rows = hostile("-c", "print(open('run/results.jsonl').read())").split("\n")
    assert {json.loads(row)["method"] for row in rows if row} == {"dense", "leank"}


def test_vllm_finds_the_plug_in_there(hostile):
    """Where loading a plug-in fails, vLLM logs a line and serves the dense model."""
    said = hostile(
        "-c",
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='vllm.general_plugins', name='leank')\n"
        "print(found.load().__module__)",
    )
    assert said.strip() == "leank.eval.serving.plugin"
