"""One mechanism checks the settings of training and evaluation."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
from annotated_types import Ge
from hypothesis import given
from hypothesis import strategies as st

from leank import backbone
from leank.eval.benchmarks.base import benchmarks
from leank.eval.methods import REGISTRY, build_method, choice, choice_class
from leank.eval.run.build import build_benchmark
from leank.typed import BadConfig, Checked, Count, OneOf, Positive, Share, _adapters, typed
from leank.wandb_log import LoggerConfig
from leank_train import settings
from tests.helpers.composed import training

DIGESTS = {  # of methods whose rows are in use, under the default cache
    "iap": ({"channels": {"name": "iap", "ratio": 0.7}}, "6be27f10b9"),
    "kivi": ({"bits": {"name": "kivi", "bits": 2, "group": 32}}, "5c7c068fe6"),
    "lethe": ({"tokens": {"name": "lethe"}, "sink": 4, "window": 32}, "41f2745688"),
    "quest": ({"reads": {"name": "quest", "budget": 1024, "page": 16, "dense_layers": 2}, "sink": 16, "window": 64},
              "4b418ba094"),
    "gemfilter": ({"prefill": {"name": "gemfilter", "budget": 1024, "layer": None}}, "2a422f7f4b"),
}  # fmt: skip
CHOICES = [(axis, name) for axis, names in REGISTRY.items() for name in names]


@dataclass(frozen=True)
class Inner(Checked):
    count: Positive
    share: Share = 0.5
    kind: Annotated[str, OneOf("a", "b")] = "a"
    lengths: Sequence[Count] | None = None
    weights: Mapping[str, Annotated[float, Ge(0)]] | None = None
    flag: bool | None = None
    _found: Any = None


@dataclass(frozen=True)
class Outer(Checked):
    inner: Inner
    other: int = 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": {"count": True}}, "inner.count=True must be"),
        ({"inner": {"count": 1.0}}, "inner.count=1.0 must be"),
        ({"inner": {"count": None}}, "inner.count=None must be"),
        ({"inner": {}}, "inner.count is not set"),
        ({"inner": 3}, "inner=3 must be a group of settings"),
        ({"inner": {"count": 1, "share": float("nan")}}, "inner.share=nan must be"),
        ({"inner": {"count": 1, "share": "abc"}}, "inner.share='abc' must be"),
        ({"inner": {"count": 1, "kind": "c"}}, "inner.kind='c' must be"),
        ({"inner": {"count": 1, "flag": 1}}, "inner.flag=1 must be"),
        (
            {"inner": {"count": 1, "lengths": [1, -1]}},
            "inner.lengths=[1, -1] [1] must be",
        ),
        (
            {"inner": {"count": 1, "weights": {"x": float("inf")}}},
            "inner.weights={'x': inf} must be",
        ),
        (
            {"inner": {"coutn": 1}},
            "inner.coutn is no setting; did you mean count? There are count, share, kind, lengths, weights, flag",
        ),
        ({"inner": {"count": 1}, "_found": 1}, "_found is no setting; there are inner, other"),
    ],
)  # fmt: skip
def test_the_message_names_the_dotted_key_and_what_it_takes(given, message):
    with pytest.raises(BadConfig) as caught:
        typed(Outer, given)
    assert str(caught.value).startswith(message)


def test_values_stay_as_they_are_given():
    """An integer where a number is meant is not converted: digests and fingerprints are of what was written."""
    assert repr(typed(Inner, {"count": 1, "share": 0}).share) == "0"


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())))
def test_a_count_takes_counts_alone(value):
    good = type(value) is int and 1 <= value <= 2**53
    try:
        typed(Inner, {"count": value})
    except BadConfig:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(("axis", "name"), CHOICES)
def test_every_number_of_a_method_has_its_type_and_a_bound(axis, name):
    """No field of a method takes true for a number, a text for a number, or a number below all bounds."""
    target = choice_class(axis, name)
    for field in fields(target):
        if field.name in _adapters(target) and isinstance(field.default, int | float) and field.default is not True:
            for bad in (-1e30, float("nan"), "abc", *([True, -(10**9), 1.5] if type(field.default) is int else ())):
                if bad is True and isinstance(field.default, bool):
                    continue
                with pytest.raises(BadConfig, match=rf"method\.x\.{axis}\.{field.name}="):
                    choice(axis, {"name": name, field.name: bad}, f"method.x.{axis}")


@pytest.mark.parametrize("name", benchmarks())
def test_every_number_of_a_benchmark_has_its_type_and_a_bound(name):
    target = benchmarks()[name]
    for field in fields(target):
        if field.name in _adapters(target) and type(field.default) is int:
            for bad in (-1, 1.5, True, "abc", float("nan")):
                with pytest.raises(BadConfig, match=rf"benchmark\.{field.name}="):
                    build_benchmark({"name": name, field.name: bad})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_method("x", {}, {"windw": 3}), r"cache\.windw is no setting; did you mean window\?"),
        (lambda: build_method("x", {"channel": {}}), r"method\.x\.channel is no setting; did you mean channels\?"),
        (lambda: build_method("x", {"bits": {"name": "kivi"}, "backend": "tritn"}), r"x\.backend='tritn' must be"),
        (lambda: choice("channels", {"name": "os:system"}, "m"), "is no choice of channels; give a dataclass that sub"),
        (lambda: typed(LoggerConfig, {"_target_": "os.system"}, "logger."), "logger._target_ is no setting"),
        (lambda: typed(LoggerConfig, {"kind": "os.system"}, "logger."), "logger.kind='os.system' must be"),
        (lambda: backbone.load_config("reference", {"rope_tetha": 1e4}), r"model\.overrides\.rope_tetha is no setting"),
        (
            lambda: backbone.load_config("reference", {"rope_parameters": {"rope_tetha": 1e4}}),
            r"rope_parameters\.rope_tetha is no setting; did you mean rope_theta\?",
        ),
        (
            lambda: backbone.load_config("reference", {"rope_parameters": 5}),
            r"model\.overrides\.rope_parameters=5 must be a mapping",
        ),
        (
            lambda: backbone.load_config("reference", {"max_position_embeddings": "many"}),
            r"model\.overrides\.max_position_embeddings='many' is of another type than the model's own 8192",
        ),
    ],
)  # fmt: skip
def test_evaluation_refuses_nonsense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+sead=3"], r"sead is no setting; did you mean seed\? There are model, data"),
        (["stage1.lr=1e30"], r"stage1\.lr=1e\+30 must be"),
        (["++stage2.lam=inf"], r"stage2\.lam=inf must be"),
        (["+model.overrides.rope_tetha=1"], r"model\.overrides\.rope_tetha is no setting"),
        (["data.tasks=3"], r"data\.tasks=3 must be"),
        (["+trainer.gradient_clip_val=1"], r"trainer\.gradient_clip_val is no setting"),
        (["+logger._target_=os.system"], r"logger\._target_ is no setting"),
        (["+data.question=1"], r"data\.question is no setting; did you mean questions\?"),
        (["++stage2.lam=auto"], "stage2.lam='auto' has no effect: only stage 1 has it; leave it out"),
        (["++stage2.l1=sum"], "stage2.l1='sum' has no effect: only stage 1 has it"),
        (["++stage1.straight_through=alpha_beta"], "stage1.straight_through='alpha_beta' has no effect: only stage 2"),
        (["stage1.l1=sum"], "stage1.l1='sum' and stage1.reduction='official' with stage1.lam='auto': .* fit means"),
        (["stage1.reduction=paper"], "stage1.reduction='paper' with stage1.lam='auto'"),
        (["++stage1.objective=mse"], "stage1.objective='mse' must be"),
        (["trainer.sequence_parallel=2"], "trainer.sequence_parallel=2 needs several processes"),
        (["trainer.shard_weights=true"], "trainer.shard_weights=True needs several processes"),
        (["trainer=fsdp", "validation.samples=1"], "validation.samples=1: validation runs in one process"),
        (
            ["trainer=sequence_parallel", "+model.overrides.rope_parameters={rope_type: dynamic, factor: 2.0}"],
            "trainer.sequence_parallel=4: the RoPE of .*rope_type=dynamic",
        ),
        (["trainer.precision=bf16-true"], "trainer.precision='bf16-true' rounds the scores or the logits"),
        (["trainer.prefill_kernel=flash_attn"], "prefill_kernel='flash_attn', but the package is not installed"),
    ],
)
def test_training_refuses_nonsense(overrides, message):
    with pytest.raises(BadConfig, match=message):
        settings.check(training("+experiment=reference_demo", *overrides))


@pytest.mark.parametrize("name", DIGESTS)
def test_digests_of_methods_are_those_of_rows_in_use(name):
    given, digest = DIGESTS[name]
    config = build_method(name, given, {"sink": 128, "window": 1024, "flush": 32}).config()
    assert hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10] == digest
