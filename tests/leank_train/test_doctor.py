"""python -m leank_train doctor: it says of every family what the tests of families find, and no weights are needed."""

import copy
import json
import math
import re
import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from leank.backbone import load_config
from leank.eval.cache import compressed_cache
from leank.eval.methods.bits.kivi import KIVI
from leank.shape import kv_shape
from leank.typed import BadConfig
from leank_train import consult, doctor
from leank_train.__main__ import fitted
from leank_train.keys import KeySizes, _of_keys, joined, of_files, of_text
from leank_train.recipes import Layouts, check
from leank_train.settings import fingerprint
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


ALL_FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {}, "on a CPU alone: head_dim 16 is none of"),
        ("llama", {"head_dim": 64}, "yes, on GPUs or a CPU"),
        ("olmo3", {}, "no: olmo3 has layers of sliding_attention"),
        ("mistral", {"sliding_window": 64}, "no: it has a sliding window of 64"),
        ("gemma2", ALL_FULL, "no: gemma2 has soft-capped logits"),
        ("gpt_oss", {}, "no: gpt_oss has attention sinks"),
        ("gemma3", {"head_dim": 64}, "on a CPU alone: it has layers with a sliding window"),
        ("gemma3", ALL_FULL, "yes, on GPUs or a CPU"),
    ],
)
def test_what_is_served_is_what_the_plugin_takes(family, changes, said):
    config = build(family).config
    assert doctor._server(type(config).from_dict({**config.to_dict(), **changes})).startswith(said)


def test_a_gpu_server_is_advised_no_layout_that_is_served_on_a_cpu_alone(tmp_path, monkeypatch):
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    Gemma3TextConfig(**sizes, head_dim=64, sliding_window=4096, max_position_embeddings=32768).save_pretrained(tmp_path)
    for gpu, advised in ((False, "a layout of bits"), (True, "dense")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        said = doctor.examine(str(tmp_path), (32768,), (64,), 80 * GIB, server=True)
        assert f"take {advised}, or look with --probe." in said.splitlines()[0]


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
def test_the_kernel_is_told_by_head_dim(dim, kv_heads, said, monkeypatch):
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=kv_heads, head_dim=dim)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert re.match(said, dict(doctor.answers(model))["GPU kernel"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dict(doctor.answers(model))["GPU kernel"].startswith("no")


def test_the_bytes_are_those_that_a_cache_holds():
    """Of the whole prompt in 16 bits, against the parts of a real cache without its tables and slack."""
    model, tokens = build("llama"), 320
    ends = doctor.sizes(model.config)
    table = doctor.gains(model.config, 10**6, [tokens], [1], 0, ends).set_index("method")["cache"]
    dense = 2 * 2 * 2 * 16 * tokens * doctor.ITEMSIZE
    assert table["dense"] == f"{dense / 1024:.3g} KiB"
    sink, window = ends
    middle = 2 * 2 * (8 + 16) * (tokens - sink - window) * doctor.ITEMSIZE
    held = middle + 2 * 2 * 2 * 16 * (sink + window) * doctor.ITEMSIZE
    assert table["LeanK 50%"] == f"{held / 1024:.3g} KiB"
    assert compressed_cache(model, None).compressed[0].sizes.sink == 128  # the doctor's own sizes are the small ones


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["reference", "reference_mixed", "mistral", "narrow"])
def test_the_commands_fit_the_model_and_the_machine(name, gpu, tmp_path):
    if name == "mistral":  # 131,072 positions, and a sliding window of 4,096 tokens
        name = str(save_model(tmp_path, MistralForCausalLM, MistralConfig, max_position_embeddings=131072))
    if name == "narrow":  # heads of 24 channels take a mask
        name = str(save_model(tmp_path, head_dim=24, max_position_embeddings=4096))
    train, evaluates = doctor.commands(name, load_config(name), gpu)
    program, *overrides = shlex.split(train)[2:]
    assert program == "leank_train"
    config = check(training(*overrides))
    assert isinstance(config, Layouts) != bool(kv_shape(load_config(name)).head_dim % 16)
    assert (config.stage1.steps > 0) == gpu
    assert gpu or config.data.max_length * config.data.calibration <= 8192
    given = evaluation(*shlex.split(evaluates)[3:])
    assert given["benchmark"]["name"] == "text"
    KIVI(**{key: given["method"]["kivi4"]["bits"][key] for key in ("bits", "group")}).check(load_config(name), None)


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
        (["reference", "--memory", "x"], 2, r"argument --memory: x is no number of GiB above 0; give one"),
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


GIB = 2**30


def advised(tokens, batch, memory, fp8="unknown", head_dim=128, weights=3 * GIB, **how):
    """What is advised on a model of the 1.5B's shape, 28 KiB of K and V a token."""
    config = LlamaConfig(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=32768,
    )  # fmt: skip
    sizes, lost = torch.full((28, 256), 500.0 if fp8 == "saturates" else 5.0), (1, 8) if fp8 == "coarse" else ()
    keys = KeySizes(sizes, 60.0 if fp8 == "safe" else None, "from K's biases", lost=lost)
    assert keys.fp8 == fp8
    given = {"trains": True, "served": True, "server": False} | how
    return doctor.advice(config, (weights, weights), tokens, batch, memory, keys, (16, 256), **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((400, 8, 80 * GIB), r"^400 tokens lie mostly in sink and window, 272 tokens .*: take dense\.$"),
        ((8192, 1, 80 * GIB), r"^1 prompt of 8,192 tokens .* gains less than a tenth .*, and they fit: take dense\.$"),
        ((32768, 64, 80 * GIB), r"56 GiB of K and V beside 3 GiB .* at 0\.25 of the middle's bytes .*: take a layout"),
        ((32768, 64, 14 * GIB), r"which do not fit into 14 GiB, and at 0\.15 of .* the most that fits: take a layout"),
        ((32768, 64, 4 * GIB), r"a layout of bits at 0\.1 holds 10: take fewer or shorter ones"),
        ((32768, 64, 2 * GIB), r"^The weights alone take 3 GiB of 2 GiB: take a larger machine"),
    ],
)  # fmt: skip
def test_what_to_take_is_told_with_its_reason(given, said):
    assert re.search(said, advised(*given))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"trains": False}, r"the model cannot be trained here: take KIVI 4 bits\.$"),
        ({"head_dim": 24, "memory": 12 * GIB}, r"a multiple of 16 channels: take KIVI 4 bits\.$"),
        ({"trains": False, "memory": 6 * GIB}, r"cannot be trained here, and KIVI's 4 bits hold 10: take fewer"),
        ({"head_dim": 80}, r"they fit, and no GPU kernel reads heads of this shape in fewer bits: take dense\.$"),
        ({"head_dim": 256}, r"no GPU kernel reads heads of this shape in fewer bits: take a mask, LeanK 70%\.$"),
        ({"server": True, "fp8": "safe"}, r"FP8 holds the model's keys: take FP8\.$"),
        ({"server": True, "fp8": "coarse"}, r"more than the text moves them: take a layout of bits\.$"),
        ({"server": True, "fp8": "coarse", "head_dim": 32}, r"the text moves them: take a mask, LeanK 70%\.$"),
        ({"server": True, "fp8": "saturates", "served": False}, r"keys reach 500, beyond FP8's .*: take dense\.$"),
        ({"server": True}, r"nothing bounds the model's keys for FP8: take a layout of bits, or look with --probe\.$"),
    ],
)
def test_what_to_take_depends_on_what_the_model_allows(how, said):
    how = how.copy()
    assert re.search(said, advised(32768, 64, how.pop("memory", 200 * GIB), **how))


def test_a_model_of_sliding_windows_alone_is_left_dense(tmp_path):
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    MistralConfig(**sizes, head_dim=64, sliding_window=4096, max_position_embeddings=32768).save_pretrained(tmp_path)
    assert re.search(r"layers that stay as they are \(sliding windows\): take dense\.$", doctor.examine(
        str(tmp_path), (), (64,), 80 * GIB), re.MULTILINE)  # fmt: skip


def test_positions_are_those_of_the_scaled_rope_and_commands_are_quoted(tmp_path):
    folder = tmp_path / "my model"
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2Config(**sizes, max_position_embeddings=8192, rope_parameters=rope).save_pretrained(folder)
    said = doctor.examine(str(folder), (), (1,))
    assert "32,768 positions" in said
    train = next(line for line in said.splitlines() if line.strip().startswith("python -m leank_train"))
    assert f"model.name={folder}" in shlex.split(train)
    assert "pruning.nested=[0.1,0.15,0.2]" in shlex.split(train)
    assert "'pruning.nested=[0.1,0.15,0.2]'" in train  # or some shells look for files of that name


def test_models_of_more_than_text_and_encoders_are_named(tmp_path):
    LlavaConfig().save_pretrained(tmp_path / "llava")
    T5Config().save_pretrained(tmp_path / "t5")
    for name, said in (("llava", "takes more than text"), ("t5", "is no decoder of transformers")):
        with pytest.raises(ValueError, match=rf"\({name}\) {said}"):
            doctor.examine(str(tmp_path / name), (), (1,))


def test_layouts_by_name_are_told_to_models_of_their_architecture():
    config = Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2,
    )  # fmt: skip
    (line,) = doctor.ready(config)
    assert "qwen2.5-coder-1.5b-7.5pct, qwen2.5-coder-1.5b-7.5pct-packed, qwen2.5-coder-1.5b-10pct" in line
    assert "smollm2" not in line
    config.num_hidden_layers = 27
    assert not doctor.ready(config)


def test_lengths_beyond_the_positions_have_a_line_and_no_table(tmp_path):
    build("llama").config.save_pretrained(tmp_path)
    both = doctor.examine(str(tmp_path), (400, 600), (1,))
    assert "600 tokens are beyond the model's 512 positions" in both
    assert re.search("^ *400 +dense", both, re.MULTILINE)
    assert not re.search("^ *600 +dense", both, re.MULTILINE)
    assert "dense" not in doctor.examine(str(tmp_path), (600,), (1,))


def planted(folder, biases=None, weight=None, family="qwen2"):
    """A tiny model in a folder whose K has biases, {(layer, channel of the first head): value}, or one norm weight."""
    model_class, config_class = {
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
    }[family]
    changes = {"head_dim": 16, "sliding_window": 256} if family == "gemma3" else {"head_dim": 16}
    save_model(folder, model_class, config_class, **changes)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if biases and name.endswith("k_proj.bias"):
            tensors[name] = torch.ones_like(tensors[name])
    for (layer, channel), value in (biases or {}).items():
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"][channel] = value
    if weight is not None:
        for name in tensors:
            if name.endswith("k_norm.weight"):
                tensors[name] = torch.full_like(tensors[name], weight)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("biases", "fp8", "said"),
    [
        ({(1, 0): 300.0, (1, 8): 400.0}, "saturates", "outliers of 500 in layer 1"),  # a pair, which RoPE turns
        ({(0, 3): 210.0}, "unknown", "outliers of 210 in layer 0"),
        ({(0, 3): 4.0, (1, 2): -7.0}, "unknown", "channels reach 7"),
        ({}, "unknown", "no size"),
    ],
)
def test_planted_biases_are_found_without_the_model(tmp_path, monkeypatch, biases, fp8, said):
    name = planted(tmp_path, biases)
    found = of_files(name, load_config(name))
    assert found.fp8 == fp8
    assert said in found.said()[0]
    monkeypatch.setattr("leank.backbone._weights", lambda *given: pytest.fail("weights are loaded"))
    text = doctor.examine(name, (400,), (1,))
    assert ("FP8, not safe here" in text) == (fp8 in ("saturates", "coarse"))
    assert re.search(r"^FP8 +no" if fp8 != "unknown" else r"^FP8 +not known", text, re.MULTILINE)


def test_yarn_stretches_keys_and_a_tower_beside_the_decoder_has_none(tmp_path):
    name = planted(tmp_path, {(1, 0): 300.0})
    tensors = load_file(tmp_path / "model.safetensors")
    bias = tensors["model.layers.0.self_attn.k_proj.bias"]
    tensors["vision_tower.encoder.layers.0.self_attn.k_proj.bias"] = torch.full_like(bias, 900.0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = load_config(name)
    assert of_files(name, config).peak == pytest.approx(300, rel=1e-4)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    config.rope_parameters = rope
    assert of_files(name, config).peak == pytest.approx(300 * (0.1 * math.log(4) + 1), rel=1e-4)


def test_a_text_says_nothing_of_longer_ones_where_no_bound_does():
    zero = torch.zeros(1, 4)
    for bound, more in ((None, True), (700.0, True), (440.0, False)):
        assert ("longer texts" in KeySizes(zero, bound, "here", read=True).said()[1]) == more


def test_the_keys_of_a_text_are_those_that_the_biases_say(tmp_path):
    """Two channels of a pair, of which a position turns one to nearly the pair's norm."""
    name = planted(tmp_path, {(1, 0): 300.0, (1, 8): 400.0})
    read = of_text(name)
    assert 0.95 * 500 < read.peak < 1.1 * 500
    assert read.outliers == [1]
    both = joined(of_files(name, load_config(name)), read)
    assert both.fp8 == "saturates"
    assert "from K's biases, and from a text of 512 tokens" in both.said()[0]
    assert joined(of_files(name, load_config(name)), replace(read, largest=read.largest * 0)).peak == 500


@pytest.mark.parametrize(("bias", "lost"), [(0.05, ()), (100.0, (1,))])
def test_fp8_is_coarse_where_it_rounds_by_more_than_the_text_moves(tmp_path, bias, lost):
    """The bias of channel 7 and 15, which turn by 1e-3.5 a token, is a constant, beside which weights say little."""
    read = of_text(planted(tmp_path, {(1, 7): bias}))
    assert (read.lost, read.fp8) == (lost, "coarse" if lost else "safe")
    assert ("in layers 1 it rounds channels by more than the text moves them" in read.said()[1]) == bool(lost)


def test_a_probe_that_the_model_does_not_allow_is_said_and_left_out(tmp_path, monkeypatch):
    build("qwen3_next").config.save_pretrained(tmp_path)
    monkeypatch.setattr("leank.backbone._weights", lambda *given: pytest.fail("weights are loaded"))
    said = doctor.examine(str(tmp_path), (400,), (1,), probe=True)
    assert re.search(r"^probe +no: layer 0 of qwen3_next .*: no K and V to replay$", said, re.MULTILINE)
    assert "Bytes of a prompt" in said


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(("weight", "fp8"), [(1.0, "safe"), (300.0, "unknown")])
def test_a_norm_of_k_bounds_its_keys(tmp_path, family, weight, fp8):
    name = planted(tmp_path, weight=weight, family=family)
    found = of_files(name, load_config(name))
    assert found.bound == pytest.approx(4 * (weight + (family == "gemma3")))  # sqrt(16) |w|
    assert found.fp8 == fp8
    assert of_text(name).peak <= found.bound * (1 + 1e-5)
    assert f"none is beyond {found.bound:.0f}" in found.said()[0]


def test_weights_that_are_not_here_or_damaged(tmp_path):
    name = planted(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read .*; copy it again"):
        of_files(name, load_config(name))
    (tmp_path / "model.safetensors").unlink()
    assert of_files(name, load_config(name)).source == "its weights are not here"


def test_the_bias_of_a_projection_of_all_three():
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1)
    fused = torch.arange(4 * 8 + 2 * 2 * 8.0)
    assert torch.equal(_of_keys(fused, config), fused[32:48])
    assert torch.equal(_of_keys(fused[32:48], config), fused[32:48])
    assert _of_keys(fused[:5], config) is None
