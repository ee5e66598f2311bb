"""Sharing masks: what is pushed is read again, in a process whose hub is a server on this machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leank import ChannelMask, compressed_cache
from leank.shape import architecture
from leank.versions import CACHE
from leank_train.share import main as share
from tests import ROOT
from tests.helpers import hub
from tests.helpers.families import build

PROGRAM = """
import json, sys, torch
from leank import ChannelMask
mask = ChannelMask.load(sys.argv[1])
found = {"commit": mask.push_to_hub("org/mask"), "branch": mask.push_to_hub("org/mask", private=True, revision="v2")}
for name, args in {"name": ("org/mask",), "revision": ("org/mask", "v2"), "path": ("hf://org/mask@v2",)}.items():
    again = ChannelMask.from_pretrained(*args)
    found[name] = bool((again.keep == mask.keep).all()) and again.metadata == mask.metadata
found["load"] = ChannelMask.load("hf://org/mask").pruning_ratio
for name in ("org/none", "org/mask@nowhere", "not a name", "a/b/c"):
    try:
        ChannelMask.from_pretrained(name)
    except FileNotFoundError as error:
        found[name] = str(error)
try:
    mask.push_to_hub("not a name")
except ValueError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture
def mask():
    keep = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(3)) < 0.4
    keep[1, 1] = False
    metadata = {"model": "org/tiny", "sink": 4, "window": 8, "seed": 1, "lengths": [64, 128],
                "heldout": {"tasks": [0.01, 0.008, 0.013]}}  # fmt: skip
    return ChannelMask(keep, metadata)


def test_what_is_pushed_is_read_again(mask, tmp_path):
    mask.save(tmp_path / "mask.safetensors")
    with hub.running() as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path / "mask.safetensors"], cwd=ROOT, capture_output=True, text=True,
            env={"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "a",
                 "HF_HUB_DISABLE_XET": "1", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
    assert found["commit"].startswith(server.url)
    assert [found[how] for how in ("name", "revision", "path")] == [True] * 3
    assert found["load"] == mask.pruning_ratio
    assert server.private == {"org/mask": False}  # it was there when it was asked for as private
    assert {*server.repos["org/mask"]} == {"main", "v2"}
    files = server.repos["org/mask"]["main"]
    assert {*files} == {
        "mask.safetensors", "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt",
    }  # fmt: skip
    assert "'hf://org/mask'" in files["custom_generate/generate.py"].decode()
    for name in ("org/none", "org/mask@nowhere", "not a name", "a/b/c"):
        assert "the hub gave no mask.safetensors" in found[name]
        assert "\n" not in found[name]
    assert re.match("Repo id must .*'not a name'", found["refused"])


def test_the_card_says_what_the_mask_is(mask, tmp_path):
    mask.save_pretrained(tmp_path, "org/mask", "apache-2.0")
    card = (tmp_path / "README.md").read_text()
    for text in (
        'base_model: "org/tiny"', 'license: "apache-2.0"', f"| channels | {int(mask.keep.sum())} of 64 kept",
        "| heads without channels | 1 of 4", "| sink, window | 4 and 8 tokens",
        "held-out tasks | 0.0100 nats a token [0.0080", 'from_pretrained("org/mask")',
    ):  # fmt: skip
        assert text in card
    odd = ChannelMask(mask.keep, {"model": "<script>{{ 7 * 7 }}"})
    odd.save_pretrained(tmp_path / "odd")
    assert "| model | &lt;script&gt;{{ 7 * 7 }} |" in (tmp_path / "odd" / "README.md").read_text()
    with pytest.raises(ValueError, match="Repo id must"):
        odd.save_pretrained(tmp_path / "odd", 'x")\nimport os')
    bare = ChannelMask(mask.keep)
    bare.save_pretrained(tmp_path / "bare")
    assert "| model | unknown |" in (tmp_path / "bare" / "README.md").read_text()
    assert (ChannelMask.from_pretrained(tmp_path / "bare").keep == mask.keep).all()


@pytest.mark.parametrize("name", ["smollm2", "/home/me/weights", "./weights", "runs/one/weights", "here/weights"])
def test_a_card_names_no_base_model_that_the_hub_cannot_have_and_no_path(name, mask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/weights").mkdir(parents=True)
    ChannelMask(mask.keep, {"model": name}).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "base_model" not in card
    assert f"| model | {Path(name).name} |" in card
    assert f"pruned for {Path(name).name}\n" in card


@pytest.mark.parametrize(
    ("steps", "said"),
    [(20, "It was learned once and serves"), (0, "from the closed form, without a step of"), (None, "It serves every")],
)
def test_a_card_says_learned_only_where_a_step_ran(steps, said, mask, tmp_path):
    known = {} if steps is None else {"steps": steps, "lengths": [8, 16], "seed": 1}
    figures = {"heldout": {"tasks": [0.01]}, "heldout_documents": 1}
    ChannelMask(mask.keep, known | figures).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert said in card
    assert ("trained on" in card) == bool(steps)
    assert "| KL to the full model, held-out tasks | 0.0100 nats a token, documents: 1 |" in card


def test_generate_from_a_folder_is_generate_with_the_cache(mask, tmp_path):
    model = build("llama")
    ids = torch.arange(40)[None] % 61
    want = compressed_cache(model, mask).generate(model, input_ids=ids, max_new_tokens=8, do_sample=False)
    mask.save_pretrained(tmp_path / "shared")
    found = model.generate(
        ids, max_new_tokens=8, do_sample=False, custom_generate=str(tmp_path / "shared"), trust_remote_code=True,
        mask=tmp_path / "shared",
    )  # fmt: skip
    assert torch.equal(found, want)
    given = {"custom_generate": str(tmp_path / "shared"), "trust_remote_code": True, "max_new_tokens": 2}
    with pytest.raises(ValueError, match="mask=None would prune nothing"):  # the folder names no repository
        model.generate(ids, **given)
    own = {"past_key_values": compressed_cache(model, mask), "mask": tmp_path / "shared"}
    with pytest.raises((TypeError, ValueError), match=CACHE):
        model.generate(ids, **given, **own)


def test_a_mask_knows_its_architecture(mask):
    config = build("llama").config
    mine = ChannelMask(mask.keep, {"architecture": architecture(config)})
    mine.check_model(config)
    other = build("phi3").config
    with pytest.raises(ValueError, match=r"another architecture .* mask\.for_any_model\(\)"):
        mine.check_model(other)
    with pytest.raises(ValueError, match="another architecture"):
        compressed_cache(build("phi3"), mine)
    mine.for_any_model().check_model(other)


def test_the_command_writes_the_folder_first(mask, tmp_path, capsys):
    mask.save(tmp_path / "mask.safetensors")
    share([str(tmp_path), "org/mask", "--folder", str(tmp_path / "shared"), "--licence", "mit"])
    assert 'license: "mit"' in (tmp_path / "shared/README.md").read_text()
    assert "without --folder" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        share([str(tmp_path / "none"), "org/mask"])
    assert re.match("leank_train share: mask=.*none does not exist", capsys.readouterr().err)
