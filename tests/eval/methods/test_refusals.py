"""What cannot be right is refused when a method is made or checked, and the message names it.

Bounds of single settings are tests/leank_train/test_settings.py's.
"""

import pytest

from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import build_method
from tests.helpers.cache_oracle import tiny_model

LOWEST = {"name": "lowest_frequencies", "ratio": 0.5}
REFUSED = [  # axis, its choice, what is said; of a model of 6 layers, 8 channels
    ("channels", {"name": "no_such:Thing"}, r"method\.m\.channels\.name='no_such:Thing' cannot be imported"),
    ("channels", {"name": "leank.eval.methods.channels.think:Thing"}, r"channels\.think:Thing' cannot be imported"),
    ("channels", {"name": "leank_budget"}, "mask is not set"),
    ("channels", {"name": "by_length", "below": LOWEST}, "by_length.above is not set"),
    ("channels", {"name": "by_length", "below": LOWEST, "above": {"name": "leank"}}, "above: mask is not set"),
    ("channels", {"name": "by_length", "below": LOWEST, "above": {"name": "leanc"}},
     "by_length.above.name='leanc' is unknown"),
    ("channels", {"name": "iap", "salient_min": 0.2, "salient_max": 0.1}, "must be at most salient_max=0.1"),
    ("channels", {"name": "iap", "ratio": 0.75, "salient_max": 0.5}, "protects more than the 2 of 8 channels"),
    ("tokens", {"name": "snap"}, "method.m.tokens.name='snap' is unknown; choose one of adakv, duo_attention"),
    ("tokens", {"name": "streaming_llm", "budget": 9}, "method.m.tokens.budget is no setting"),
    ("tokens", {"name": "snapkv", "budget": 30}, "method.m: budget=30 is less than sink=2 and window=32"),
    ("tokens", {"name": "h2o", "budget": 7}, "raise it to at least 8"),
    ("tokens", {"name": "h2o", "budget": 0.4}, r"budget=0\.4 is a share of the prompt; evict=true needs a number"),
    ("tokens", {"name": "snapkv", "budget": 1.5}, r"budget=1\.5 must be"),
    ("tokens", {"name": "snapkv", "kernel": 4}, "kernel=4 must be odd"),
    ("tokens", {"name": "snapkv", "pooling": "sum"}, "pooling='sum' must be"),
    ("tokens", {"name": "duo_attention", "pattern": "none.tsv"}, "pattern=none.tsv: none.tsv not found.; give"),
    ("tokens", {"name": "duo_attention", "task": "vtt"}, "'vtt' is unknown"),
    ("tokens", {"name": "adakv", "scores_of": {"name": "streaming_llm"}},
     r"adakv.scores_of.name=streaming_llm has no scores"),
    ("tokens", {"name": "adakv", "scores_of": {"name": "snapkv", "budget": 9}},
     r"adakv.scores_of.budget=9 does not count; set adakv.budget"),
    ("tokens", {"name": "lethe", "evict_at": 8}, r"method.m: evict_at=8 must be more than sink \+ window = 8"),
    ("tokens", {"name": "lethe", "limit": 50}, "limit=50 must be 0"),
    ("prefill", {"name": "asl", "budget": 32}, "budget=32 must be more than window=32"),
    ("prefill", {"name": "asl", "kernel": 4}, "kernel=4 must be odd"),
    ("prefill", {"name": "asl", "first": 6}, "first=6 must be from 1 to 5"),
    ("prefill", {"name": "fastkv", "layer": 5}, "layer=5 must be from 0 to 4"),
    ("reads", {"name": "quest", "budget": 7}, "budget=7 is less than sink=2 and window=6"),
]  # fmt: skip


@pytest.mark.parametrize(("axis", "config", "message"), REFUSED, ids=str)
def test_refused_by_name(axis, config, message):
    model, (_, tokenizer) = tiny_model("llama", num_hidden_layers=6), load_config(ModelConfig())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_method("m", {axis: config}, {"sink": 2, "window": 6}).axes[axis].check(model.config, tokenizer)


def test_one_layer_has_nothing_above_it():
    asl = build_method("m", {"prefill": {"name": "asl", "budget": 64}}).prefill
    with pytest.raises(ValueError, match="the model has one layer: leave out `prefill`"):
        asl.check(tiny_model("llama", num_hidden_layers=1).config, None)
