"""A report refuses rows that it cannot be computed from, in one line that names the sample and the field."""

import sys

import pytest

from leank.eval.__main__ import command_line
from leank.eval.rows.result_row import check_rows
from leank.eval.rows.results import Key, Results
from tests.helpers.report_rows import row

KEY = {**Key("m", "dense", "c0", "ruler", "vt", 64, "0", 42, "after_question")._asdict(), "score": 1.0}
NEAR = {"tokens": 4, "kl": 0.1, "top1": 0.5, "loss": None, "dense_loss": None, "non_finite": None}


def test_a_row_that_lacks_fields_is_refused_in_one_line(tmp_path, monkeypatch):
    with Results(tmp_path) as results:
        results.append(KEY)
    monkeypatch.setattr(sys, "argv", ["eval", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command_line()
    said = str(ended.value)
    assert said.startswith("eval: results row")
    assert "\n" not in said
    assert "'sample': '0'" in said
    assert "is missing; it was edited, or another version wrote it: move" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", float("nan")), ("score", "1"), ("settings", {}), ("settings", {"method": {}, "specials": "neither"}),
        ("cache_bytes", {}), ("seconds", None), ("meta", []), ("length", "4096"), ("non_finite", "x"),
        ("score", 1.5), ("length", -1), ("prompt_tokens", 10**400), ("new_tokens", 10**20),
        ("selected_layer", -2), ("method", 10**400),
        ("cache_bytes", {"total": 0}), ("cache_bytes", {"total": -5}),
        ("cache_bytes", {"total": 9, "middle": -5}), ("cache_bytes", {"total": 1e308}),
        ("cache_bytes", {"total": 9, "allocated": float("inf")}),
        ("seconds", {"per_token": -3.0}), ("seconds", {"prefill": 1e308}),
        ("meta", {"depth_percent": "x"}), ("meta", {"depth_percent": [1]}),
        ("meta", {"op": "x"}),
        ("meta", {"op": 2.5}), ("meta", {"d": [1]}),
        ("meta", {"turn": "x", "mode": "reuse"}),
        ("meta", {"turn": None}), ("meta", {"turn": True}), ("meta", {"mode": [1]}),
        ("settings", {"method": {"channels": "leank"}}),
        ("settings", {"method": {"matched": 5}}), ("settings", {"method": {"matched": {"settings": 3}}}),
        ("settings", {"method": {"matched": {"settings": [1]}}}),
        ("fidelity", NEAR | {"kl": float("nan")}), ("fidelity", NEAR | {"tokens": 1.5}),
        ("fidelity", NEAR | {"kl": None}), ("fidelity", NEAR | {"top1": 5.0}),
        ("fidelity", NEAR | {"loss": 1e308, "dense_loss": -1e308}), ("fidelity", NEAR | {"top1": None}),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_named(field, value):
    with pytest.raises(ValueError, match=f"'{field}.*(is missing|is wrong)"):
        check_rows([{**row("dense", 0, 1.0), field: value}])


@pytest.mark.parametrize("field", row("dense", 0, 1.0))
def test_no_field_may_be_missing(field):
    damaged = row("leank", 0, 0.5)
    check_rows([damaged])
    del damaged[field]
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        check_rows([damaged])
