"""What every choice of tokens does with batches, short prompts, and layers that slide or hold part of the prompt."""

from dataclasses import replace

import pytest
import torch

from leank.eval.cache import Sizes
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.tokens.adakv import AdaKV
from leank.eval.methods.tokens.expected_attention import ExpectedAttention
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.keydiff import KeyDiff
from leank.eval.methods.tokens.pyramidkv import PyramidKV
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.methods.tokens.streaming_llm import StreamingLLM
from leank.eval.methods.tokens.tova import TOVA
from tests.helpers.token_choices import alone, duo, kept_of, observed

SIZES = Sizes(2, 6, 4)
ANY = [
    TOVA(12, evict=False), KeyDiff(12), ExpectedAttention(12), AdaKV(12, {"name": "keydiff"}), SnapKV(0.4, 3),
    SnapKV(12, 3), SnapKV(12, 4),
]  # fmt: skip


@pytest.mark.parametrize("choice", [*ANY, PyramidKV(12, 3), H2O(12), StreamingLLM(), "duo"], ids=str)
def test_rows_of_a_batch_keep_what_they_keep_alone(choice, tmp_path):
    lengths = (33, 7, 21)
    model, found = observed(lengths, family="qwen3")
    choice = duo(tmp_path, [[0.1, 0.9], [0.8, 0.2]]) if choice == "duo" else choice
    keeps = choice.keep_mask(found, model.config, SIZES)
    assert any(keep is not None for keep in keeps)
    for row, length in enumerate(lengths):
        one = choice.keep_mask(alone(model, lengths, row), model.config, SIZES)
        for keep, expected in zip(keeps, one, strict=True):
            assert kept_of(keep, row, length) == kept_of(expected, 0, length)


@pytest.mark.parametrize("choice", [SnapKV(40, 4), PyramidKV(40, 4), H2O(40)], ids=str)
def test_short_prompts_stay_whole(choice):
    model, found = observed((40, 3))
    assert choice.keep_mask(found, model.config, SIZES) == [None, None]


@pytest.mark.parametrize("choice", [*ANY, PyramidKV(12, 4), StreamingLLM()], ids=str)
def test_layers_that_slide_or_hold_part_of_the_prompt(choice):
    model, found = observed((30,), family="mistral", sliding_window=16)
    assert choice.keep_mask(found, model.config, SIZES) == [None, None]
    model, found = observed((30,))
    kept = torch.tensor([[-1, 3, *range(10, 30)]])
    part = PromptLayer(30)
    part.hold(kept, 30)
    part.update(found.layers[1].keys[:, :, kept[0]], found.layers[1].values[:, :, kept[0]])
    part.queries = found.layers[1].queries
    whole, of_part = choice.keep_mask(replace(found, layers=[found.layers[0], part]), model.config, SIZES)
    assert whole.shape[2] == 30
    assert of_part.shape[2] == 22
    assert not of_part[:, :, 0].any()
