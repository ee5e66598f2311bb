"""match in a run: every cell its own settings, rows and report; what cannot be matched is said."""

import logging

import pytest

from leank.conf.eval import method_options
from leank.eval.__main__ import run
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prompts import encode
from leank.eval.methods import AXES
from leank.eval.methods.memory import share_of_dense
from leank.eval.report.summary import summarise
from leank.eval.rows.results import read
from leank.eval.run.build import build_job
from tests.helpers.composed import evaluation

MODEL, _ = load_config(ModelConfig())
SMALL = ("+experiment=reference_methods", "benchmark.samples=1", "benchmark.tasks=[niah_single_2,vt]")


def test_every_cell_is_brought_to_the_bytes_of_the_named_method(caplog):
    with caplog.at_level(logging.WARNING, "eval"):
        job, tokenizer = build_job(evaluation(*SMALL, "benchmark.lengths=[1024,1536]"))
    assert len(job.by_cell) == 4
    settings = []
    for cell, methods in job.by_cell.items():
        rows = [job.benchmark.row(cell, sample, tokenizer, 0) for sample in cell.samples]
        lengths = [len(encode(tokenizer, row).ids) for row in rows]
        by_label = {method.label: method for method in methods}
        assert list(by_label) == [method.label for method in job.methods]
        wanted = share_of_dense(by_label["leank"], MODEL, lengths, 4)
        moved = {label for label, method in by_label.items() if method.matched is not None}
        assert {"snapkv", "h2o", "pyramidkv", "streaming_llm", "gemfilter", "fastkv", "asl", "snapkv_think"} <= moved
        for label in moved:
            assert share_of_dense(by_label[label], MODEL, lengths, 4) == pytest.approx(wanted, rel=0.03), label
            assert by_label[label].config()["matched"]["to"] == "leank"
        for label in by_label.keys() - moved:
            assert f"{label} keeps its settings" in caplog.text or label in ("dense", "leank")
            assert by_label[label] == next(method for method in job.methods if method.label == label)
        settings.append(by_label["snapkv"].tokens.budget)
    assert len(set(settings)) == 4  # by length and by task


def test_rows_carry_the_settings_and_the_report_shows_one_method(tmp_path):
    benchmark = ("benchmark.lengths=[640,704]", "benchmark.tasks=[niah_multikey_2]", "benchmark.samples=1")
    given = evaluation(
        "+experiment=reference_ruler", "method=[dense,snapkv,think]", "match=0.7", "max_new_tokens=2", *benchmark
    )
    assert run(given, tmp_path) == 6
    assert run(given, tmp_path) == 0  # the same settings are found again
    rows = list(read(tmp_path))
    found = {(row["method"], row["length"]): row["settings"]["method"] for row in rows}
    assert found["snapkv", 640]["matched"] == {"settings": ["tokens.budget"], "to": 0.7}
    assert found["snapkv", 640]["tokens"]["budget"] < found["snapkv", 704]["tokens"]["budget"]
    assert len({row["config"] for row in rows if row["method"] == "snapkv"}) == 2
    (report,) = summarise(rows)["runs"]
    assert [cell["method"] for cell in report["overall"]] == ["dense", "snapkv", "think"]
    for row in rows:
        held = row["cache_bytes"]["total"] - row["cache_bytes"].get("tables", 0) - row["cache_bytes"].get("slack", 0)
        dense = 2 * 7 * 4 * 64 * 4 * row["prompt_tokens"]
        assert held / dense == pytest.approx(1 if row["method"] == "dense" else 0.7, rel=0.03)


def test_the_reference_model_s_settings_are_those_of_the_methods():
    """One label, one axis, the same choices."""
    names = method_options("method/reference")
    usual = evaluation(f"method=[{','.join(names)}]")["method"]
    own = evaluation(f"method=[{','.join(f'reference/{name}' for name in names)}]")["method"]
    assert list(usual) == list(own) == names
    for name in names:
        ours, theirs = ({axis: one["name"] for axis, one in x[name].items() if axis in AXES} for x in (usual, own))
        assert ours == theirs
        assert usual[name] != own[name]


@pytest.mark.parametrize("compress", ["after_question", "before_question"])
def test_bytes_are_those_of_the_tokens_that_are_compressed(compress):
    given = evaluation(
        "+experiment=reference_ruler", "method=[snapkv]", "match=0.7", f"compress={compress}", "benchmark.samples=1",
        "benchmark.lengths=[704]", "benchmark.tasks=[niah_multikey_2]",
    )  # fmt: skip
    job, tokenizer = build_job(given)
    ((cell, (method,)),) = job.by_cell.items()
    prompt = encode(tokenizer, job.benchmark.row(cell, "0", tokenizer, 0))
    tokens = {"after_question": len(prompt.ids), "before_question": prompt.question}
    shares = {name: share_of_dense(method, MODEL, [length], 4) for name, length in tokens.items()}
    near = min(shares, key=lambda name: abs(shares[name] - 0.7))
    assert near == compress
    assert shares[near] == pytest.approx(0.7, abs=2 / tokens[near])


@pytest.mark.parametrize("to", ["lethe", "nobody", 0, 1.5])
def test_bad_targets_are_named(to):
    overrides = ("method=[dense,lethe]", "benchmark.lengths=[1024]", "benchmark.samples=1", f"match={to}")
    with pytest.raises(ValueError, match=f"match={to}: .*give a share of dense bytes or one of dense, lethe"):
        build_job(evaluation(*overrides))
