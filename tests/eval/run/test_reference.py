"""The replay on the reference model: retrieval works, and tokens are those of separate generate() calls."""

import pytest
import torch
from transformers import DynamicCache

from leank.channel_scores import lowest_frequencies
from leank.eval.benchmarks.base import Cell
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prompts import encode
from leank.eval.methods import build_method
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from leank.mask import ChannelMask
from leank.shape import kv_shape

SIZES = {"sink": 16, "window": 128, "flush": 32, "backend": "torch"}


@pytest.fixture(scope="module")
def reference():
    settings = ModelConfig(dtype="float32", device="cpu")
    return (*load_config(settings), load_model(settings))


def test_tokens_are_those_of_separate_runs(reference):
    config, tokenizer, model = reference
    benchmark = Ruler(tasks=["niah_multikey_2"], lengths=[640], samples=2)
    rows = [benchmark.row(Cell("niah_multikey_2", 640, ()), str(i), tokenizer, 0) for i in range(2)]
    prompts = [encode(tokenizer, row) for row in rows]
    keep = lowest_frequencies(config, 0.7).keep.clone()
    keep[3, 1] = False  # a head without channels keeps no middle
    masks = {
        "leank": keep,
        "lowest_frequencies": lowest_frequencies(config, 0.7).keep,
        "random": torch.rand(kv_shape(config), generator=torch.Generator().manual_seed(0)) < 0.3,
    }
    methods = [build_method("dense")]
    methods += [
        build_method(label, {"channels": {"name": "leank", "mask": ChannelMask(mask)}}, SIZES)
        for label, mask in masks.items()
    ]
    found = {
        m.label: a for m, a in Replay(model, tokenizer, Settings(max_new_tokens=12)).answers(prompts, rows, methods)
    }
    model.set_attn_implementation(ATTENTION)
    for label, answers in found.items():
        for prompt, answer in zip(prompts, answers, strict=True):
            cache = compressed_cache(model, masks[label], **SIZES) if label in masks else DynamicCache(config=config)
            ids = torch.tensor([prompt.ids])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=12, do_sample=False
            )
            tokens = out[0, ids.shape[1] :].tolist()
            assert answer.tokens == [t for t in tokens if t != tokenizer.eos_token_id]
    for row, answer in zip(rows, found["dense"], strict=True):
        assert row.answers[0] in answer.text
    assert found["random"][0].tokens != found["dense"][0].tokens
