"""A model is loaded whole or refused in one line: no weight is made up, and no override is ignored without a word."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

from leank import backbone
from leank.data_gen.tasks import Mixture
from leank.shape import kv_shape
from leank.typed import BadConfig
from tests.helpers.text_tokenizers import KINDS, tokenizer
from tests.helpers.tiny_run import save_model

SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=25, **SLOW)
@given(data=st.data())
def test_a_weight_that_is_missing_or_of_another_shape_is_never_made_up(model_folder, tmp_path_factory, data):
    tensors = load_file(model_folder / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    change = data.draw(st.sampled_from(["missing", "renamed", "cut", "one more"]))
    lost = tensors.pop(name)
    if change == "renamed":
        tensors[f"module.{name}"] = lost
    elif change == "cut":
        tensors[name] = lost[:-1].clone()
    elif change == "one more":
        tensors[name] = torch.cat([lost, lost[:1]])
    folder = tmp_path_factory.mktemp("other")
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no weights of the right shape for 1 of its tensors, such as") as caught:
        backbone.load(str(folder))
    assert name in str(caught.value)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(-2, 2), st.sampled_from(["", "x", "yarn", "silu"]),
    st.just([]), st.just({}), st.just(["full_attention"]),
)  # fmt: skip
ROPE = ("rope_type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "beta_fast")


@settings(max_examples=60, **SLOW)
@given(data=st.data())
def test_any_override_answers_in_one_line_or_loads(model_folder, data):
    config = AutoConfig.from_pretrained(model_folder).to_dict()
    key = data.draw(st.sampled_from(sorted(config.keys() - {"num_hidden_layers", "transformers_version"})))
    if data.draw(st.booleans()):
        kind = data.draw(st.sampled_from(["default", "yarn", "linear", "llama3"]))
        overrides = {"rope_parameters": {"rope_type": kind, data.draw(st.sampled_from(ROPE)): data.draw(VALUES)}}
    else:
        overrides = {key: data.draw(VALUES)}
    said = ""
    try:
        backbone.load(str(model_folder), overrides=overrides)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    assert len(said.splitlines()) <= 1, said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"factor": 4.0}, r"rope_parameters\.factor has no effect with rope_type=default; give a rope_type, too"),
        ({"rope_type": "yarm", "factor": 4.0}, r"rope_type='yarm' must be"),
    ],
)
def test_a_change_of_rope_without_effect_is_refused(model_folder, given, message):
    with pytest.raises(BadConfig, match=message):
        backbone.load_config(str(model_folder), {"rope_parameters": given})


def test_parameters_of_rope_for_each_type_of_layer_are_changed_where_the_model_reads_them(tmp_path):
    """Gemma 3 reads the parameters of each type of layer, and nothing beside them."""
    folder = str(save_model(tmp_path, Gemma3ForCausalLM, Gemma3TextConfig, head_dim=16, sliding_window=64))
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(BadConfig, match=r"rope_parameters\.rope_type is no setting; there are full_attention, sliding"):
        backbone.load_config(folder, {"rope_parameters": yarn})
    found = backbone.load_config(folder, {"rope_parameters": {"full_attention": yarn}}).rope_parameters
    assert found["full_attention"] == {"rope_theta": 1_000_000.0, **yarn}
    assert found["sliding_attention"] == {"rope_theta": 10_000.0, "rope_type": "default"}


def test_the_tokenizer_of_a_model_with_more_tokens_is_refused(tmp_path):
    save_model(tmp_path, vocab_size=4000)
    with pytest.raises(ValueError, match="has embeddings of 4000 tokens, and its tokenizer knows 4096"):
        backbone.load(str(tmp_path))


def test_damaged_files_are_named_before_weights_are_loaded(model_folder, tmp_path):
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"model\.name=.*model\.safetensors is damaged .* copy it again"):
        backbone.load_config(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2})[:-1])
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
        backbone.load_config(str(tmp_path))


def test_a_folder_called_as_a_shipped_model_is_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text("[")
    assert backbone.load_config("reference").model_type == "llama"


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_layers_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="model=gemma4_text has layers of different shapes"):
        kv_shape(
            transformers.Gemma4TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
        )


@pytest.mark.parametrize("kind", [*KINDS, "llama2"])
@pytest.mark.parametrize("name", ["kv", "multivalue", "multiquery", "passkey", "fwe", "niah_single_1"])
def test_pieces_of_a_prompt_have_the_tokens_of_the_whole(kind, name):
    """A tokenizer that puts a blank before every text must not put one between document, question and answer."""
    words = copy.deepcopy(tokenizer("sentencepiece" if kind == "llama2" else kind))
    if kind == "llama2":
        words.backend_tokenizer.pre_tokenizer = None
        words.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    loaded, odd = backbone.Backbone(SimpleNamespace(), words, "x"), 0
    for index in range(4):
        document = Mixture({name: 1}, words, 2500, 2500)[index]
        (asked,) = document.questions
        texts = [document.context, asked.question + asked.answer_prefix, asked.target]
        question, answer = loaded.encode_question(asked.question, asked.answer_prefix), loaded.encode(asked.target)
        if kind in ("reference", "gpt4"):  # nothing stands before a text, so pieces are as they always were
            assert [question, answer] == [words(text, add_special_tokens=False)["input_ids"] for text in texts[1:]]
        else:
            *whole, end = words("".join(texts))["input_ids"]
            assert end == words.eos_token_id
            odd += loaded.encode_context(texts[0]) + question + answer != whole
    assert odd <= 1  # a document may end within a token
