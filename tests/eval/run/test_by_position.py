"""Runs in which every method reads dense's reply: rows, a killed run that goes on, captured steps, and the report."""

import json

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leank.eval.inference import decode
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prefill import pad_left
from leank.eval.inference.sampling import Sampling
from leank.eval.report import write_report
from leank.eval.rows import Collected, Results, check_rows, read
from leank.eval.run.job import Job, repeated, repeated_along
from leank.eval.run.replay import Settings
from tests.helpers.cache_oracle import tiny_model
from tests.helpers.captured import Fake
from tests.helpers.replay_tools import Letters, Two, methods, prompts

TIMES = {"seconds"}
BLOCK = 3


class Words(Letters):
    """A tokenizer whose ids are those of letters."""

    all_special_tokens = ()
    chat_template = None

    def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False, **options):
        ids = [2 + ord(letter) % 40 for letter in text]
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(ids))]}

    def get_vocab(self):
        return {}


class Long(Two):
    """Prompts of several lengths, long enough to be compressed."""

    def row(self, cell, sample, tokenizer, overhead):
        made = super().row(cell, sample, tokenizer, overhead)
        return type(made)(**{**vars(made), "context": cell.task * (30 + 3 * int(sample))})


def job(**given):
    some = {"max_new_tokens": 8, "by_position": BLOCK, "sampling": Sampling(1.0, seed=3), "batch_size": 2, **given}
    return Job(ModelConfig(dtype="float32"), methods()[:3], Long(), Settings(**some))


def run(work, results):
    return work.run(results, tiny_model("llama"), Words())


def said(found):
    """Rows as texts, without times, in any order."""
    texts = []
    for one in found:
        one = json.loads(json.dumps({k: v for k, v in one.items() if k not in TIMES}))
        one["fidelity"]["along"].pop("seconds")
        texts.append(json.dumps(one, sort_keys=True))
    return sorted(texts)


def test_every_method_reads_one_reply_and_rows_say_how_far_it_is_from_dense():
    whole = Collected()
    assert run(job(), whole) == 3 * 3
    check_rows(whole.rows)
    for sample in {(one["task"], one["sample"]) for one in whole.rows}:
        mine = [one for one in whole.rows if (one["task"], one["sample"]) == sample]
        assert len({tuple(one["tokens"]) for one in mine}) == len({one["prediction"] for one in mine}) == 1
        for one in mine:
            assert one["metric"] == "top1"
            assert one["score"] == one["fidelity"]["top1"]
            assert one["settings"]["by_position"] == BLOCK
            assert len(one["fidelity"]["along"]["kl"]) == 3
            assert (one["fidelity"]["kl"] < 1e-12) == (one["method"] == "dense")
    assert len({tuple(one["tokens"]) for one in whole.rows}) == 3


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9))
def test_tokens_that_end_a_repeated_4_gram_are_counted_by_block(tokens, block):
    found, ends = repeated_along(tokens, block), []
    for end in range(len(tokens)):
        gram = tokens[end - 3 : end + 1]
        ends.append(end >= 3 and any(tokens[start : start + 4] == gram for start in range(end - 3)))
    wanted = [ends[start : start + block] for start in range(0, len(tokens), block)]
    assert found == [sum(some) / len(some) for some in wanted]
    if len(tokens) > 3:
        assert sum(ends) / (len(tokens) - 3) == pytest.approx(repeated(tokens))


@pytest.mark.parametrize("kept", [1, 4, 7])
def test_a_killed_run_goes_on_with_the_replies_that_were_read(kept, tmp_path, monkeypatch):
    whole = Collected()
    run(job(), whole)
    with Results(tmp_path) as results:
        for one in whole.rows[:kept]:
            results.append(one)
    with Results(tmp_path) as results:
        written = []
        tokens = decode.decode

        def counted(*given, **more):
            written.append(1)
            return tokens(*given, **more)

        monkeypatch.setattr("leank.eval.run.replay.decode", counted)
        assert run(job(), results) == 9 - kept
        assert len(written) == {1: 2, 4: 1, 7: 0}[kept]  # batches of which a reply is not known: "a" has two samples
    assert said(read(tmp_path)) == said(whole.rows)


def test_a_reply_of_other_settings_is_not_taken(tmp_path):
    with Results(tmp_path) as results:
        run(job(), results)
        first = {tuple(one["tokens"]) for one in read(tmp_path)}
        run(job(sampling=Sampling(1.0, seed=4)), results)
    assert first < {tuple(one["tokens"]) for one in read(tmp_path)}


def test_captured_steps_give_the_states_of_launched_ones(monkeypatch):
    model, ids = tiny_model("llama"), prompts([40, 33])
    padded, real = pad_left(ids, 0, "cpu")
    follow, found = torch.tensor(prompts([24] * 2, seed=3)), []
    for method in methods():
        passed = method.run_prefill(model, padded, real, 24)
        for captured in (False, True):
            with monkeypatch.context() as patch:
                if captured:
                    patch.setattr(decode, "DecodeLoop", Fake)
                    for module in ("leank.eval.inference.decode", "leank.eval.cache.graph"):
                        patch.setattr(f"{module}.capturable", lambda cache: True)
                before = Fake.captures
                cache = method.compressed(model, passed)
                ended = []
                states, stepped = decode.read_as_decoded(model, cache, follow, real, passed.lengths, 10, ended.append)
                found.append(states)
                assert (Fake.captures - before, stepped, ended) == (captured, captured, [10, 20, 24])
        torch.testing.assert_close(*found[-2:], rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_steps_captured_on_a_gpu_give_the_states_of_launched_ones(captures, monkeypatch):
    from leank.eval.inference.models import load_model
    from leank.eval.methods import build_method

    model = load_model(ModelConfig())
    chosen = build_method("one", {"bits": {"name": "kivi", "bits": 4}}, {"sink": 16, "window": 96})
    ids, real = pad_left([[7 + i % 900 for i in range(n)] for n in (300, 420)], 0, model.device)
    follow, found = torch.arange(10, 210, device=model.device).view(2, 100), []
    for least in (1000, 16):  # never captured, captured
        monkeypatch.setattr("leank.eval.inference.decode.CAPTURE_FOR", least)
        passed = chosen.run_prefill(model, ids, real, 100)
        cache = chosen.cache(model, passed)
        states, stepped = decode.read_as_decoded(model, cache, follow, real, passed.lengths, 40)
        found.append(states)
        assert stepped
    assert captures == [1]
    assert torch.equal(*found)


def test_the_report_has_figures_by_position_and_by_quarter(tmp_path):
    with Results(tmp_path) as results:
        run(job(max_new_tokens=13), results)
    write_report(tmp_path)
    rows, places = list(read(tmp_path)), pd.read_csv(tmp_path / "positions.csv")
    assert sorted({*places["position"]}) == [3, 6, 9, 12, 15]
    for (method, position), part in places.groupby(["method", "position"]):
        mine = [one for one in rows if one["method"] == method]
        at = position // BLOCK - 1
        by_task = [[one["fidelity"]["along"] for one in mine if one["task"] == task] for task in ("a", "b")]
        kl = sum(sum(a["kl"][at] for a in some) / len(some) for some in by_task) / 2  # tasks count alike
        assert part["kl"].item() == pytest.approx(kl, abs=1e-15)
        assert part["n"].item() == 3
        held = [a["bytes"][at] for some in by_task for a in some]
        assert part["bytes"].item() == pytest.approx(sum(held) / 3)
    summary = json.loads((tmp_path / "summary.json").read_text())["runs"][0]
    quarters = {(one["method"], one["quarter"]): one for one in summary["by_quarter"]}
    assert len(quarters) == 3 * 4
    for method in ("leank", "lowest"):
        first, last = quarters[method, 0], quarters[method, 3]
        assert last["kl_more"] == pytest.approx(last["kl"] - first["kl"])
        assert last["kl_more_low"] <= last["kl_more"] <= last["kl_more_high"]
    text = (tmp_path / "summary.md").read_text()
    assert "# two on reference, dense's reply is read through the cache" in text
    assert text.index("## Along the reply") < text.index("## Overall")
    assert "of each quarter end a 4-gram" in text
    assert (tmp_path / "kl_by_position.png").exists()


def test_quarters_are_those_of_each_replys_own_length(tmp_path):
    """A method that drifts does so in every reply; longer replies with another level must not look like a drift."""
    rows = []
    for sample, (blocks, level) in enumerate([(4, 1.0), (8, 3.0)]):
        whole = Collected()
        run(job(max_new_tokens=12), whole)
        for one in whole.rows:
            if one["sample"] == "0" and one["task"] == "a":
                along = one["fidelity"]["along"]
                for name in ("kl", "top1", "bytes", "tables", "planned", "seconds", "repeated"):
                    along[name] = [level if name == "kl" else 0.5] * blocks
                rows.append({**one, "sample": str(sample)})
    with Results(tmp_path) as results:
        for one in rows:
            results.append(one)
    write_report(tmp_path)
    rows[0]["fidelity"]["along"]["kl"].pop()
    with pytest.raises(ValueError, match="lists of along have different lengths"):
        check_rows(rows)
    summary = json.loads((tmp_path / "summary.json").read_text())["runs"][0]
    assert {one["kl"] for one in summary["by_quarter"]} == {2.0}
    assert {one["kl_more"] for one in summary["by_quarter"] if one["quarter"]} == {0.0}
    by = {(one["method"], one["position"]): one for one in summary["by_position"]}
    assert (by["leank", 12]["n"], by["leank", 15]["n"], by["leank", 15]["kl"]) == (2, 1, 3.0)
