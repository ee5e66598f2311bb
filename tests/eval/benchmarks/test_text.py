"""Natural text as a benchmark: its windows, and a run whose rows are those of reading by hand."""

from itertools import pairwise

import pytest
import torch

from leank.data_gen.haystack import paragraphs
from leank.eval.__main__ import run
from leank.eval.benchmarks.base import Cell
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.benchmarks.text import Text
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prompts import encode
from leank.eval.methods import Method
from leank.eval.report.summary import summarise
from leank.eval.rows.results import read
from leank.eval.run.build import build_job
from leank.eval.run.job import Job
from leank.eval.run.settings import Settings
from tests.helpers.composed import evaluation

CONFIG, TOKENIZER = load_config(ModelConfig())


def checked(**settings):
    made = Text(**settings)
    made.check(CONFIG, TOKENIZER, 0, None)
    return made


def windows(made):
    """(cell, what is prefilled, the rest, the prompt) of every sample."""
    for cell in made.cells():
        for sample in cell.samples:
            row = made.row(cell, sample, TOKENIZER, 0)
            yield cell, row.context, row.question, encode(TOKENIZER, row)


def test_windows_are_pieces_of_the_text_that_do_not_overlap():
    text, places = "\n".join(paragraphs(None, "test")), {}
    for cell, context, rest, prompt in windows(checked(lengths=[512, 1000], samples=30)):
        assert len(prompt.ids) <= cell.length
        assert cell.length - len(prompt.ids) <= 3
        assert abs(prompt.question - cell.length / 2) <= 3
        at = text.find(context + rest)
        assert at >= 0
        places.setdefault(cell.length, []).append((at, at + len(context + rest)))
    for found in places.values():
        assert found != sorted(found)
        found.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(found))


def test_more_samples_begin_with_fewer_and_the_seed_draws_others():
    few, many, other = (
        [context for _, context, _, _ in windows(checked(lengths=[512], samples=n, seed=seed))]
        for n, seed in ((4, 0), (9, 0), (4, 1))
    )
    assert few == many[:4] != other


def test_files_of_a_folder_share_no_window(tmp_path):
    for name, letter in (("b", "stone "), ("a", "river ")):
        (tmp_path / f"{name}.txt").write_text(letter * 700)
    made = checked(path=str(tmp_path), lengths=[256], samples=4, prefilled=0.25)
    for _, context, rest, prompt in windows(made):
        assert ("stone" in context + rest) != ("river" in context + rest)
        assert abs(prompt.question - 64) <= 3
    (tmp_path / "copy").mkdir()
    for file in tmp_path.glob("*.txt"):
        (tmp_path / "copy" / file.name).write_text(file.read_text())
    assert checked(path=str(tmp_path / "copy"), lengths=[256], samples=4, prefilled=0.25).identity() == made.identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [16384]}, "16384 is more than the model's max_position_embeddings=8192"),
        ({"lengths": [8192], "samples": 50}, r"benchmark.samples=50: the text has \d windows of 8192 tokens"),
        ({"lengths": [8], "prefilled": 0.1}, "benchmark.prefilled=0.1 of benchmark.lengths=8"),
        ({"path": "/nowhere"}, "benchmark.path='/nowhere' is no text"),
        ({"path": __file__}, "is no text; give a .txt"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checked(**settings)


SMALL = (
    "benchmark=text", "benchmark.lengths=[128]", "benchmark.samples=2", "batch_size=2", "method=[dense,think]",
    "cache={sink:4,window:36,flush:8}", "+model.device=cpu", "model.dtype=float32",
)  # fmt: skip


def test_a_run_has_the_loss_of_one_pass_over_each_window(tmp_path):
    assert run(evaluation(*SMALL), tmp_path) == 4
    assert run(evaluation(*SMALL), tmp_path) == 0  # nothing is missing
    benchmark, model = checked(lengths=[128], samples=2), load_model(ModelConfig(dtype="float32", device="cpu"))
    rows = list(read(tmp_path))
    for row in rows:
        prompt = encode(TOKENIZER, benchmark.row(Cell("text", row["length"], ()), row["sample"], TOKENIZER, 0))
        ids = torch.tensor([prompt.ids])
        with torch.no_grad():
            logits = model(ids).logits[0, prompt.question : -1].log_softmax(-1)
        wanted = -logits.gather(-1, ids[0, prompt.question + 1 :, None]).mean()
        found = row["fidelity"]
        assert found["dense_loss"] == pytest.approx(float(wanted), rel=1e-4)
        assert found["tokens"] == len(logits)
        assert (row["prompt_tokens"], row["new_tokens"]) == (prompt.question, len(logits) + 1)
        if row["method"] == "dense":
            assert (found["kl"], found["top1"], found["loss"]) == (0, 1, found["dense_loss"])
        else:
            assert found["kl"] > 0
            assert row["compressed"]
    (summary,) = summarise(rows)["runs"]
    assert [cell["compared"] for cell in summary["overall"]] == [2, 2]
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith("# text on reference, read through the cache")
    assert "perplexity" in page
    assert "100%" not in page.split("##")[1]  # there are no replies that could be the same


def test_bytes_can_be_matched_before_the_text_is_read():
    job, _ = build_job(evaluation(*SMALL, "match=0.8", "benchmark.lengths=[512]"))
    think = next(m for methods in job.by_cell.values() for m in methods if m.label == "think")
    assert think.matched is not None
    assert think.channels.ratio != 0.6


def test_the_setting_counts_in_the_key_only_where_it_is_on():
    jobs = [Job(ModelConfig(), [Method("dense")], Ruler(), Settings(fidelity=n)) for n in (0, 16, 32)]
    assert len({job.digest(job.methods[0], "vt") for job in jobs}) == 3
    assert [job.config(job.methods[0], "vt").get("fidelity") for job in jobs] == [None, 16, 32]
