"""Tiny random models of every supported architecture."""

import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

gc.disable()  # until all is imported and collected: of what it would look through nothing goes
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which importing a model does

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

pytest.register_assert_rewrite("tests.helpers")  # so that what fails there shows its values, as in a test
# a busy machine is no reason to fail; CI judges every change by the same cases, where other runs look for new ones
for name, examples in (("quick", 25), ("all", 100)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )  # fmt: skip
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
if importlib.util.find_spec("matplotlib") is not None:  # the environment with vLLM has none
    from tests.helpers import pictures

    pictures.draw_none()
torch.set_num_threads(1)  # threads cost more than they give on models this small
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    from tests.helpers import interpreter

    interpreter.change()


def pytest_collection_finish():
    """Let no collection look at what imports have left: half a million objects, a third of a second each time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Let the end of the process find them again, or extensions complain of leaks."""
    gc.unfreeze()


ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "mistral": (MistralForCausalLM, MistralConfig),
}


def tiny_model(architecture: str, seed: int = 0, **settings) -> PreTrainedModel:
    """Two layers, four query heads on two KV heads, head_dim 8, float64; weights large enough for sharp attention."""
    model_class, config_class = ARCHITECTURES[architecture]
    if architecture == "mistral":
        settings.setdefault("sliding_window", None)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **settings}))
    return model.double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """The folder of a tiny random Llama with the reference tokenizer, for runs that load their model; only read it."""
    from tests.helpers.tiny_run import save_model  # brings Hydra, which most tests do without

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def drawn():
    """Figures that this test makes files of are drawn."""
    with pictures.drawn():
        yield


@pytest.fixture
def captures(monkeypatch) -> list[int]:
    """An item for every step that a decoding loop captures."""
    from leank.eval.cache.graph import DecodeLoop  # brings the cache, which most tests do without

    found, capture = [], DecodeLoop.capture
    monkeypatch.setattr(DecodeLoop, "capture", lambda loop: (found.append(1), capture(loop)))
    return found
