"""python -m leank_train doctor: it says of every family what the tests of families find, and no weights are needed."""

import copy
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from leank.backbone import load_config
from leank.eval.cache import compressed_cache
from leank.typed import BadConfig
from leank_train import consult, doctor
from leank_train.__main__ import fitted
from leank_train.settings import check, fingerprint
from tests.helpers.composed import evaluation, training
from tests.helpers.families import FAMILIES, REFUSED, UNTRAINED, build
from tests.helpers.tiny_run import save_model


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_gets_the_answers_of_its_tests(name, tmp_path):
    build(name).config.save_pretrained(tmp_path)
    text = doctor.examine(str(tmp_path), (), (1, 8))
    if name in REFUSED:
        assert re.search(rf"^cache +no: .*{REFUSED[name]}", text, re.MULTILINE)
        assert "dense" not in text
        return
    assert re.search(r"^cache +yes", text, re.MULTILINE)
    wanted = f"no: .*{UNTRAINED[name]}" if name in UNTRAINED else "yes"
    assert re.search(rf"^training +{wanted}", text, re.MULTILINE)
    few = r"\n(512 positions|64 tokens of its sliding window) are too few to train with this sink and window\.$"
    assert bool(re.search(few, text)) == (name not in UNTRAINED)


def test_what_is_served_is_full_attention():
    assert dict(doctor.answers(build("llama")))["vLLM"].startswith("on a CPU alone: head_dim 16")
    assert dict(doctor.answers(build("olmo3")))["vLLM"].startswith("no: it has layers of sliding_attention")


@pytest.mark.parametrize(
    ("dim", "kv_heads", "said"),
    [
        (64, 2, "yes$"),
        (128, 2, "yes$"),
        (96, 2, "no, .*: the kernel has head_dim 64, 128, 192 and 256, the model 96$"),
        (64, 1, "no, .*: the kernel has at most 16 query heads per KV head, the model 32$"),
        (192, 2, "yes; over fewer bits .* plain PyTorch alone: "),
        (256, 2, "yes; over fewer bits .* plain PyTorch alone: "),
    ],
)
def test_the_kernel_is_told_by_head_dim(dim, kv_heads, said):
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=kv_heads, head_dim=dim)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert re.match(said, dict(doctor.answers(model))["GPU kernel"])


def test_the_bytes_are_those_that_a_cache_holds():
    """Of the whole prompt in 16 bits, against the parts of a real cache without its tables and slack."""
    model, tokens = build("llama"), 320
    table = doctor.gains(model.config, 10**6, [tokens], [1]).set_index("method")["cache"]
    dense = 2 * 2 * 2 * 16 * tokens * doctor.ITEMSIZE
    assert table["dense"] == f"{dense / 1024:.3g} KiB"
    sink, window = doctor.sizes(model.config)
    middle = 2 * 2 * (8 + 16) * (tokens - sink - window) * doctor.ITEMSIZE
    held = middle + 2 * 2 * 2 * 16 * (sink + window) * doctor.ITEMSIZE
    assert table["LeanK 50%"] == f"{held / 1024:.3g} KiB"
    assert compressed_cache(model, None).compressed[0].sizes.sink == 128  # the doctor's own sizes are the small ones


@pytest.mark.parametrize("name", ["reference", "reference_mixed", "mistral"])
def test_the_commands_fit_the_model(name, tmp_path):
    if name == "mistral":  # 131,072 positions, and a sliding window of 4,096 tokens
        name = str(save_model(tmp_path, MistralForCausalLM, MistralConfig, max_position_embeddings=131072))
    *trains, evaluates = doctor.commands(name, load_config(name))
    for line in trains:
        program, *overrides = shlex.split(line)[2:]
        assert program == "leank_train"
        check(training(*overrides))
    assert evaluation(*shlex.split(evaluates)[3:])["benchmark"]["name"] == "text"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "x"}, r"has a config that no decoder of transformers takes \(KeyError: 'x'\); choose"),
    ],
)
def test_a_config_that_no_model_has_is_refused_by_name(change, said, tmp_path):
    build("llama").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"^model.name='{tmp_path}'.*{said}"):
        doctor.examine(str(tmp_path), (), (1,))


def test_a_model_without_attention_has_nothing_to_gain(tmp_path):
    config = copy.deepcopy(build("qwen3_next").config)
    config.layer_types = ["linear_attention"] * 2
    config.save_pretrained(tmp_path)
    said = doctor.examine(str(tmp_path), (), (1,))
    assert "nothing is compressed" in said
    assert "Bytes" not in said


def test_a_mistake_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for given, status, line in (
        (["no/such"], 1, r"leank_train doctor: model\.name='no/such' cannot be loaded"),
        (["reference", "--tokens", "0"], 2, r"argument --tokens: 0 is no number of 1 to \d+; give one"),
        (["reference", "--batch", "0"], 2, r"argument --batch: 0 is no number of 1 to \d+; give one"),
        (["reference", "--batch", "8", "x"], 2, r"argument --batch: x is no number of 1 to \d+; give one"),
    ):
        with pytest.raises(SystemExit) as error:
            consult.main(given)
        assert error.value.code == status
        assert re.search(line, capsys.readouterr().err)


def test_a_bare_command_gets_settings_that_fit_its_model(monkeypatch):
    """Named settings stay, and a run whose configuration works, or an experiment's, is left as it is."""
    smollm2 = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )  # of a package that need not be installed
    monkeypatch.setattr(
        "leank.backbone.load_config", lambda name, *more: {"smollm2": smollm2}.get(name) or load_config(name, *more)
    )
    given = training("model=smollm2", "pruning.ratio=0.5")
    config, fit = fitted(given, ["model", "pruning.ratio"], False)
    assert check(config).pruning == replace(check(config).pruning, sink=16, window=256, align=16, ratio=0.5)
    assert fit.endswith("data.min_length=1024 data.max_length=4096 validation.lengths=[4096]")
    assert given.data.max_length == 98304
    assert fingerprint(config) != fingerprint(given)
    config, fit = fitted(training("model=smollm2", "data.max_length=2048"), ["model", "data.max_length"], False)
    assert (config.data.min_length, config.data.max_length, "max_length" in fit) == (1024, 2048, False)
    with pytest.raises(BadConfig, match=r"data\.max_length=9000 is beyond the 8192 positions"):
        fitted(training("model=smollm2", "data.max_length=9000"), ["model", "data.max_length"], False)
    for works in (training("+experiment=smollm2_70pct"), training("+experiment=reference_70pct")):
        assert fitted(works, [], False) == (works, "")
    refused = training("+experiment=smollm2_70pct", "pruning.window=5000")
    assert fitted(refused, ["pruning.window"], True) == (refused, "")
