"""What a row is known by: the contents of data and model, never their place."""

import gzip
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.benchmarks.base import Cell
from leank.eval.benchmarks.gsm_infinite import GsmInfinite
from leank.eval.benchmarks.longbench import LongBench
from leank.eval.benchmarks.mmlu import Mmlu
from leank.eval.benchmarks.niah import NeedleGrid
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig
from leank.eval.methods import Method
from leank.eval.report.summary import summarise
from leank.eval.rows import Results, read
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from leank.files import BLOCK, BLOCKS, WHOLE, folder_digest
from tests import DATA
from tests.helpers.benchmark_lines import CONFIG, MMLU, QASPER

QA = DATA / "qa"


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def key(benchmark, tokenizer, task, model=None):
    benchmark.check(CONFIG, tokenizer, 0, 8)
    work = Job(model or ModelConfig(), [Method("dense")], benchmark, Settings())
    return work.key(Method("dense"), Cell(task, None, ("0",)), "0")


def test_a_longbench_folder_is_known_by_its_lines(tmp_path, tokenizer):
    rows = [{**QASPER, "_id": str(i)} for i in range(3)]
    write(tmp_path / "a" / "qasper.jsonl", rows)
    write(tmp_path / "a" / "hotpotqa.jsonl", [{**QASPER, "dataset": "hotpotqa"}])
    shutil.copytree(tmp_path / "a", tmp_path / "moved" / "b")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "qasper.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a/qasper.jsonl").read_bytes()))
    write(tmp_path / "other" / "qasper.jsonl", [*rows[:2], {**rows[2], "answers": ["Adb"]}])

    def of(folder, *tasks):
        return key(LongBench(str(tmp_path / folder), tasks=["qasper", *tasks]), tokenizer, "qasper")

    assert of("a") == of("moved/b") == of("packed") == of("a", "hotpotqa")  # another task changes no row of this one
    assert of("a") != of("other")


def test_examples_of_mmlu_count(tmp_path, tokenizer):
    def of(name, answer):
        write(tmp_path / name / "mmlu.jsonl", [{**MMLU, "split": "dev", "answer": answer}, MMLU])
        return key(Mmlu(str(tmp_path / name), tasks=["anatomy"], shots=1), tokenizer, "anatomy")

    assert of("a", "A") == of("b", "A") != of("c", "C")


@pytest.mark.parametrize(("task", "setting", "spaces"), [("qa_1", "squad", 3000), ("qa_2", "hotpotqa", 3000)])
def test_question_files_count_for_their_own_task(task, setting, spaces, tmp_path, tokenizer):
    text = (QA / f"{setting}_sample.json").read_text("utf-8")
    whole = json.loads(text)
    (whole[0] if task == "qa_2" else whole["data"][0]["paragraphs"][0]["qas"][0])["question"] = "Who else?"
    (tmp_path / "copy.json").write_text(text, encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps(whole), encoding="utf-8")

    def of(file, task=task):
        ruler = Ruler(tasks=[task], lengths=[spaces], samples=1, **{setting: str(file)})
        return key(ruler, tokenizer, task)

    own = of(QA / f"{setting}_sample.json")
    assert own == of(tmp_path / "copy.json") != of(tmp_path / "other.json")
    assert of(tmp_path / "copy.json", "vt") == of(tmp_path / "other.json", "vt")


@pytest.mark.parametrize("name", ["ruler", "niah"])
def test_essays_are_known_by_their_text(name, tmp_path, tokenizer):
    text = "One sentence stands here. " * 400
    for folder, content in (("a", text), ("b/c", text), ("d", text.replace("One", "Our", 1))):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "essays.txt").write_text(content)

    def of(folder):
        essays = str(tmp_path / folder / "essays.txt")
        if name == "niah":
            return key(NeedleGrid(lengths=[400], depths=[0], essays=essays), tokenizer, "niah")
        return key(Ruler(tasks=["niah_single_2"], lengths=[1024], samples=1, essays=essays), tokenizer, "niah_single_2")

    assert of("a") == of("b/c") != of("d")


def test_rows_of_generated_samples_keep_their_keys(tokenizer):
    """Rows that are there already are found again: whatever changes these digests makes all runs begin anew."""
    ruler = Ruler(tasks=["vt"], lengths=[1024], samples=1)
    gsm = GsmInfinite(lengths=[0], ops=[2], samples=1)
    model = ModelConfig("reference", dtype="float32", device="cpu")
    found = [key(ruler, tokenizer, "vt", model).config, key(gsm, tokenizer, "medium zero", model).config]
    assert found == ["92f382b107", "b859119168"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up model folder: its files need not be a model to be told apart."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    made.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (made / name).write_text(json.dumps({"name": name}))
    (made / "chat_template.jinja").write_text("{{ messages }}")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (made / "README.md").write_text("about it")
    return made


@settings(max_examples=20)
@given(data=st.data())
def test_any_byte_of_a_model_folder_counts(data, folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "deep" / "tiny"
    shutil.copytree(folder, copy)
    assert ModelConfig(str(copy)).identity() == ModelConfig(f"{folder}/").identity()
    file = data.draw(st.sampled_from(sorted(f for f in copy.iterdir() if f.suffix != ".md")))
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    assert ModelConfig(str(copy)).identity() != ModelConfig(str(folder)).identity()


def test_what_is_no_part_of_a_model_does_not_count(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "tiny")
    (tmp_path / "tiny" / "README.md").write_text("more about it")
    (tmp_path / "tiny" / "trainer_state.json").write_text("{}")
    assert folder_digest(tmp_path / "tiny") == folder_digest(folder)
    (tmp_path / "tiny" / "chat_template.jinja").unlink()
    assert folder_digest(tmp_path / "tiny") != folder_digest(folder)


def test_large_weights_are_read_in_part(tmp_path):
    """Sparse files of 1 GiB: size, header and blocks from end to end count, and few bytes are read."""
    file, size = tmp_path / "model.safetensors", WHOLE * 16

    def made(size=size, at=None):
        with file.open("wb") as content:
            content.write((200).to_bytes(8, "little") + b"{" * 200)
            content.truncate(size)
            if at is not None:
                content.seek(at)
                content.write(b"x")
        return folder_digest(tmp_path)

    plain = made()
    assert plain == made()
    for changed in (
        {"at": 150},
        {"at": size - 1},
        {"at": 7 * ((size - BLOCK) // (BLOCKS - 1)) + 5},
        {"size": size + 1},
    ):
        assert made(**changed) != plain


ANSWER = {
    "score": 1.0, "prediction": "x", "answers": ["x"], "metric": "longbench", "meta": {}, "prompt_tokens": 5,
    "new_tokens": 1, "cache_bytes": {"total": 8}, "batch": 1, "versions": {}, "middle_tokens": None, "compressed": None,
    "dense_only": False, "non_finite": None, "fidelity": None, "selected_layer": None,
    "seconds": dict.fromkeys(("prefill", "seal", "first_token", "per_token"), 1.0),
}  # fmt: skip


def test_rows_of_other_data_stay_apart(tmp_path, tokenizer):
    """A run that goes on with other files makes its own rows; the report has both, the last one's whole."""

    def job(answer, tasks):
        for task in tasks:
            write(tmp_path / "data" / f"{task}.jsonl", [{**QASPER, "dataset": task, "answers": [answer]}])
        benchmark = LongBench(str(tmp_path / "data"), tasks=tasks)
        benchmark.check(CONFIG, tokenizer, 0, 8)
        return Job(ModelConfig(), [Method("dense")], benchmark, Settings())

    def fill(job, score):
        with Results(tmp_path) as results:
            missing = job.missing(results.keys)
            for cell, samples, (method,) in missing:
                found = {"settings": job.config(method, cell.task), **ANSWER, "score": score}
                results.append({**job.key(method, cell, samples[0])._asdict(), **found})
        return len(missing)

    assert fill(job("Ada", ["qasper"]), 0.5) == 1
    assert fill(job("Ada", ["qasper"]), 0.5) == 0
    assert fill(job("Bob", ["qasper", "hotpotqa"]), 1.0) == 2
    assert fill(job("Bob", ["qasper", "hotpotqa"]), 1.0) == 0
    first, last = summarise(read(tmp_path))["runs"]
    assert [(c["task"], c["n"], c["score"]) for c in first["cells"]] == [("qasper", 1, 50.0)]
    assert [(c["task"], c["n"], c["score"]) for c in last["cells"]] == [("qasper", 1, 100.0), ("hotpotqa", 1, 100.0)]
    assert set(last["settings"]["data"]) == {"qasper", "hotpotqa"}


def test_lengths_of_gsm_infinite_are_called_by_their_name():
    def names(*lengths):
        benchmark = GsmInfinite(subsets=["hard"], lengths=lengths, ops=[2], samples=1)
        benchmark._plan()
        return [cell.task.removeprefix("hard ") for cell in benchmark.cells()]

    assert names(0, 8000, 16_000, 32_000, 65_536, 131_072) == ["zero", "8k", "16k", "32k", "65k", "131k"]  # as ever
    assert names(5, 500, 8000, 8500, 8999) == ["5", "500", "8k", "8500", "8999"]
    with pytest.raises(ValueError, match=r"lengths=\[8000, 8192\]: two of them are called alike"):
        names(8000, 8192)
    with pytest.raises(ValueError, match=r"lengths=\(True,\).* must be"):
        names(True)
