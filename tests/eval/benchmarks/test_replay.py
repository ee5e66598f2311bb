"""Every benchmark of the replay from made-up data: its cells, its rows, a run on a small random model, bad input."""

import csv
import gzip
import json
from dataclasses import asdict

import pytest

from leank.data_gen.gsm.infinite import realistic
from leank.data_gen.gsm.symbolic import symbolic
from leank.eval.benchmarks import infinitebench, mmlu, niah
from leank.eval.benchmarks.base import benchmarks, score_row
from leank.eval.report import write_report
from leank.eval.rows import Results, read
from leank.eval.run.build import build_job
from tests import DATA
from tests.conftest import tiny_model
from tests.helpers import longproc
from tests.helpers.benchmark_lines import AIME, BABI, GPQA, MRCR, NEEDLE, V2, helmet_files
from tests.helpers.composed import evaluation
from tests.helpers.gsm_solver import solve

QA = DATA / "qa"
FILLER = "The wind is calm and the lake is still. " * 30
# of each InfiniteBench task an input, the published answer, the options, and a reply that is right
INFINITEBENCH = {
    "passkey": ("What is the pass key?", ["71432"], [], "71432"),
    "number_string": ("What is the sequence of digits?", ["5511111111"], [], "5511111111."),
    "kv_retrieval": ('Key: "ab-1" \nThe value associated with the specified key is: ', "cd-2", [], 'It is "cd-2"'),
    "longbook_sum_eng": ("", ["A boy finds a boat."], [], "A boy finds a boat."),
    "longbook_qa_eng": ("Who rows?", ["Ada", "Ada Fox"], [], "Ada Fox"),
    "longbook_choice_eng": ("Who rows?", ["Ada"], ["Bob", "Ada", "Cy", "Di"], "B"),
    "longbook_qa_chn": ("谁划船？", ["小明"], [], "小明"),
    "longdialogue_qa_eng": ("Who is $$MASK$$?", ["ADA"], [], "ADA"),
    "code_debug": ("", ["b.run"], ["a.run", "b.run", "c.run", "d.run"], "B. b.run"),
    "math_find": ("You should answer with one number. The second largest number of the list is:", [17], [], "17"),
}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Made-up data sets in the published forms."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "ib").mkdir()
    for task, (asked, answer, options, _) in INFINITEBENCH.items():
        row = {"id": 0, "context": FILLER, "input": asked, "answer": answer, "options": options}
        lines(folder / "ib" / f"{task}.jsonl", [row, {**row, "id": 1}])
    (folder / "data.json").write_text(json.dumps([V2, {**V2, "_id": "x2", "length": "long"}]))
    helmet_files(folder)
    longproc.write(folder / "longproc")
    (folder / "needle_set.json").write_text(json.dumps([NEEDLE]))
    (folder / "books").mkdir()
    (folder / "books" / "1.txt").write_text((FILLER + "\n") * 10)
    lines(folder / "qa1_0k.jsonl", [BABI])
    lines(folder / "qa5_0k.jsonl", [{**BABI, "question": "What did John take?", "target": "milk"}])
    for name, row in (("aime25", AIME), ("gpqa_diamond", GPQA), ("2needle", MRCR)):
        lines(folder / f"{name}.jsonl", [row])
    problem = {"problem": "What is $2+3$?", "answer": "5", "unique_id": "a/1", "level": 1}
    lines(folder / "test.jsonl", [problem, {**problem, "answer": "\\frac{1}{2}", "unique_id": "a/2"}])
    for split, count in (("dev", 5), ("test", 2)):
        (folder / split).mkdir()
        for subject in mmlu.LETHE:
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as table:
                csv.writer(table).writerows([f"{i}, or not?", "a", "b", "c", "d", "ABCD"[i % 4]] for i in range(count))
    problems = [realistic(op, 2, "crazy_zootopia", "normalforward", 0, 0) for op in (2, 4)]
    rows = [{**asdict(p), "length": "zero_context"} for p in (*problems, problems[0])]
    rows.insert(2, {**asdict(symbolic(2, 0, 0))})
    for row in rows:
        del row["id"]
    with gzip.open(folder / "gsm.jsonl.gz", "wt") as packed:
        packed.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


SETTINGS = {
    "niah": ("benchmark.lengths=[400,600]", "benchmark.depths=[0,50,100]", "benchmark.split=test"),
    "infinitebench": ("benchmark.path={data}/ib", "benchmark.samples=1", "benchmark.max_length=200"),
    "longbench_v2": ("benchmark.path={data}", "benchmark.tasks=[easy,long]"),
    "babilong": ("benchmark.path={data}", "benchmark.tasks=[qa1,qa5]", "benchmark.lengths=[0k]"),
    "nolima": (
        *("benchmark.path={data}/needle_set.json", "benchmark.books={data}/books", "benchmark.lengths=[100,200]"),
        *("benchmark.depths=3", "benchmark.samples=2"),
    ),
    "helmet": (
        *("benchmark.path={data}", "benchmark.tasks=[json_kv,trec_coarse]", "benchmark.lengths=[8k]"),
        "benchmark.samples=1",
    ),
    "math500": ("benchmark.path={data}",),
    "aime": ("benchmark.path={data}", "benchmark.tasks=[aime25]"),
    "gpqa": ("benchmark.path={data}",),
    "mrcr": ("benchmark.path={data}", "benchmark.tasks=[2needle]"),
    "longgenbench": ("benchmark.questions=3", "benchmark.samples=2"),
    "longproc": ("benchmark.path={data}/longproc", "benchmark.tasks=[path_traversal_0.5k,tom_tracking_0.5k]"),
    "mmlu": ("benchmark.path={data}", "benchmark.samples=1", "benchmark.tasks=[anatomy,astronomy]"),
    "gsm_infinite": (
        *("benchmark.subsets=[medium,hard,symbolic]", "benchmark.lengths=[0]"),
        *("benchmark.ops=[2,4]", "benchmark.samples=1"),
    ),
    "ruler": (
        *("benchmark.tasks=[qa_1,qa_2]", "benchmark.lengths=[3000]", "benchmark.samples=1"),
        *(f"benchmark.squad={QA}/squad_sample.json", f"benchmark.hotpotqa={QA}/hotpotqa_sample.json"),
    ),
}


def job(data, benchmark, *overrides, reply=4):
    given = [f"benchmark={benchmark}", *overrides, "cache.sink=8", "cache.window=32"]
    given += ["method=[dense,lowest_frequencies]"] + [f"max_new_tokens={reply}"] * bool(reply)
    return build_job(evaluation(*(g.replace("{data}", str(data)) for g in given)))


@pytest.fixture(scope="module")
def model(tokenizer):
    """Random, of two narrow layers: HELMET's prompts have 8,192 tokens."""
    return tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=16384).float()


def test_every_benchmark_is_tried_here():
    elsewhere = {"longbench", "multi_turn", "text"}  # tests/eval/run/test_config.py, and files of their own
    assert set(benchmarks()) - elsewhere == set(SETTINGS)
    assert set(INFINITEBENCH) == set(infinitebench.TASKS)


@pytest.mark.parametrize("name", [n for n in SETTINGS if n != "ruler"])
def test_a_run_gives_every_row_once_and_a_report(name, data, model, tmp_path):
    made, tokenizer = job(data, name, *SETTINGS[name], reply=1)
    with Results(tmp_path) as results:
        new = made.run(results, model, tokenizer)
        assert made.missing(results.keys) == []  # ids of rows are those of the plan
    rows = list(read(tmp_path))
    planned = {(cell.task, cell.length, sample) for cell in made.benchmark.cells() for sample in cell.samples}
    assert len(rows) == new == 2 * len(planned)
    assert {(row["task"], row["length"], row["sample"]) for row in rows} == planned
    assert all(row["prompt_tokens"] > 50 or name in ("math500", "aime", "mrcr") for row in rows)
    if name == "gsm_infinite":  # the one with a table of its own
        write_report(tmp_path)
        report = (tmp_path / "summary.md").read_text()
        assert "GSM-Infinite medium ZERO" in report
        assert "GSM-Infinite hard ZERO" in report


def rows_of(made, tokenizer):
    benchmark = made.benchmark
    return {(c.task, c.length, s): benchmark.row(c, s, tokenizer, 0) for c in benchmark.cells() for s in c.samples}


def test_niah_grid_hides_one_needle_at_each_depth(data):
    made, tokenizer = job(data, "niah", *SETTINGS["niah"])
    found = rows_of(made, tokenizer)
    assert len(found) == 6
    at = {}
    for (_, length, depth), row in found.items():
        needle = niah.NEEDLE.strip()
        assert row.context.count(needle) == 1
        assert row.meta == {"depth_percent": int(depth)}
        before = row.context[: row.context.index(needle)]
        total, ahead, own = (len(tokenizer(text)["input_ids"]) for text in (row.context, before, needle))
        assert total <= length - 150
        at[length, int(depth)] = ahead / (total - own)
        assert score_row(row, niah.EXPECTED) == 1
    for length in (400, 600):
        assert at[length, 0] < 0.03
        assert 0.15 < at[length, 50] < 0.52  # moved back to the end of a sentence
        assert at[length, 100] > 0.98


def test_niah_s_official_grid():
    cells = niah.NeedleGrid(**evaluation("benchmark=niah")["benchmark"]).cells()
    assert (len(cells), len(cells[0].samples)) == (35, 35)
    assert (cells[0].length, cells[-1].length, cells[3].samples[-1]) == (1000, 16_000, "100")


@pytest.mark.parametrize("style", infinitebench.STYLES)
def test_infinitebench_rows(style, data):
    made, tokenizer = job(
        data, "infinitebench", "benchmark.path={data}/ib", f"benchmark.style={style}", "benchmark.samples=1", reply=None
    )
    found = rows_of(made, tokenizer)
    assert {task for task, _, _ in found} == set(INFINITEBENCH)
    for (task, _, _), row in found.items():
        asked, _, options, reply = INFINITEBENCH[task]
        assert FILLER in row.context
        assert "{" not in row.prompt
        assert task in ("longbook_sum_eng", "longdialogue_qa_eng", "code_debug") or asked in row.question
        assert all(f"{letter}. {option}" in row.question for letter, option in zip("ABCD", options, strict=False))
        assert row.chat == (style == "chat")
        assert score_row(row, reply) == pytest.approx(1)
        assert score_row(row, "nothing of it") < 0.5
    start = "What is the second largest number in the following list?\n\n"
    assert found["math_find", None, "0"].prompt.startswith(start)


def test_infinitebench_is_cut_in_the_middle(data):
    made, tokenizer = job(data, "infinitebench", *SETTINGS["infinitebench"])
    for row in rows_of(made, tokenizer).values():
        assert 190 < len(tokenizer(row.prompt)["input_ids"]) <= 203
        assert row.prompt.endswith(row.question[-20:])


def test_infinitebench_s_other_tasks():
    run = {"context": "def f", "input": "What is func_1(-3)?", "answer": 5, "options": []}
    row = infinitebench.InfiniteBench().build("code_run", run)
    assert "a function called func_1 in" in row.context
    assert "The value of func_1(-3) is" in row.question
    for answer in ([1, 3], [[1, 3]]):
        row = infinitebench.InfiniteBench().build("math_calc", {"context": "1 + 2", "input": "", "answer": answer})
        assert score_row(row, "[1, 3]") == 1


def test_math500_rows(data):
    made, tokenizer = job(data, "math500", *SETTINGS["math500"])
    first, second = rows_of(made, tokenizer).values()
    assert first.prompt.startswith("What is $2+3$?\nPlease reason")
    assert (score_row(first, "so \\boxed{5}"), score_row(first, "5"), score_row(second, "\\boxed{0.5}")) == (1, 0, 1)
    assert first.max_new_tokens == 32_768


@pytest.mark.parametrize("reasoning", [True, False])
def test_mmlu_rows(reasoning, data):
    made, tokenizer = job(data, "mmlu", "benchmark.path={data}", f"benchmark.reasoning={str(reasoning).lower()}")
    found = rows_of(made, tokenizer)
    assert {task for task, _, _ in found} == set(mmlu.LETHE)
    row = found["business_ethics", None, "1"]
    assert row.prompt.count("or not?") == 6
    assert row.context.startswith("The following are multiple choice questions (with answers) about  business ethics.")
    assert row.prompt.endswith("Answer:") != reasoning
    assert row.chat == reasoning
    assert score_row(row, "Because so. The answer is (B)." if reasoning else " B") == 1
    assert row.max_new_tokens == (32_768 if reasoning else 1)


def test_mmlu_from_lines(data, tmp_path):
    rows = [
        {"split": split, "subject": "anatomy", "question": f"{i}?", "choices": list("abcd"), "answer": i % 4}
        for split, count in (("dev", 5), ("test", 3)) for i in range(count)
    ]  # fmt: skip
    lines(tmp_path / "mmlu.jsonl", rows)
    given = (f"benchmark.path={tmp_path}", "benchmark.tasks=[anatomy]")
    assert len(rows_of(*job(data, "mmlu", *given))) == 3
    with pytest.raises(ValueError, match=r"anatomy has 5 dev questions, benchmark\.shots=6 needs more; lower shots"):
        job(data, "mmlu", *given, "benchmark.shots=6")


def test_generated_gsm_infinite(data):
    made, tokenizer = job(data, "gsm_infinite", *SETTINGS["gsm_infinite"][:3], "benchmark.samples=3")
    found = rows_of(made, tokenizer)
    assert {task for task, _, _ in found} == {"medium zero", "hard zero", "symbolic zero"}
    assert len(found) == 3 * 2 * 3
    for (task, _, sample), row in found.items():
        assert row.meta["op"] == int(sample.split("-")[0])
        assert row.meta["length"] == "zero"
        if task.startswith("symbolic"):
            assert score_row(row, " ".join(row.answers)) == 1
            continue
        text = row.prompt.removeprefix("Problem: ").removesuffix(" Solution: ")
        problem, question = text.split(" Question: ")
        assert solve(problem, question) == (list(row.answers), row.meta["op"])
        assert row.meta["d"] == {"medium": 2, "hard": 3}[task.split()[0]]
        assert score_row(row, f"Answer: {row.answers[0]}.") == 1


def test_gsm_infinite_from_a_file_without_ids(data):
    given = ("benchmark.path={data}/gsm.jsonl.gz", "benchmark.samples=1", "benchmark.ops=[2]")
    found = rows_of(*job(data, "gsm_infinite", *given))
    assert {key: row.id for key, row in found.items()} == {
        ("medium zero_context", None, "1"): "1", ("symbolic 0", None, "3"): "3",
    }  # fmt: skip


def test_ruler_asks_the_questions_of_the_files(data):
    made, tokenizer = job(data, "ruler", *SETTINGS["ruler"], "benchmark.tasks=[qa_1,qa_2,niah_multivalue]")
    found = rows_of(made, tokenizer)
    one = {task: score_row(row, row.answers[0]) for (task, _, _), row in found.items()}
    assert one == {"qa_1": 1, "qa_2": 1, "niah_multivalue": 0.25}  # any answer to a question, all of the values
    first = json.loads((QA / "hotpotqa_sample.json").read_text("utf-8"))[0]
    row = found["qa_2", 3000, "0"]
    assert first["question"] in row.question
    assert score_row(row, f"It is {first['answer']}.") == 1


@pytest.mark.parametrize(
    ("benchmark", "overrides", "message"),
    [
        ("niah", ["benchmark.longest=8192"], r"niah has a sample of \d+ tokens and replies of 300, .*=8192; lower"),
        ("niah", ["benchmark.lengths=[205]"], "context_length=205 leaves no room for the needle"),
        ("niah", ["benchmark.essays=no.txt", "benchmark.lengths=[400]"], "essays='no.txt' does not exist"),
        ("niah", ["benchmark.depths=[101]", "benchmark.lengths=[400]"], r"benchmark\.depths=\[101\].* must be"),
        ("infinitebench", ["benchmark.path={data}"], r"InfiniteBench longbook_sum_eng: none of .* put one there"),
        ("infinitebench", ["benchmark.path={data}/ib", "benchmark.tasks=[passkeys]"], "'passkeys' is not in Infinite"),
        ("math500", ["benchmark.path={data}"], "replies of 32768, together more than .*=8192; lower max_new_tokens"),
        ("math500", ["benchmark.path=no.jsonl"], r"MATH-500: benchmark\.path=no\.jsonl does not exist"),
        ("mmlu", ["benchmark.path={empty}"], r"MMLU abstract_algebra: none of mmlu\.jsonl.*put one there"),
        ("gsm_infinite", ["benchmark.subsets=[easy]"], r"benchmark\.subsets=\['easy'\].* must be"),
        ("gsm_infinite", ["benchmark.lengths=[8k]"], r"benchmark\.lengths=\['8k'\].* must be"),
        ("gsm_infinite", ["benchmark.ops=[1]"], r"benchmark\.ops=\[1\].* must be"),
        ("gsm_infinite", ["benchmark.samples=null"], r"benchmark\.samples=None: null means all of a file"),
        ("gsm_infinite", [], r"has a sample of \d+ tokens and replies of 4096, .*=8192; lower max"),
        ("ruler", ["benchmark.tasks=[qa_1]", "benchmark.lengths=[3000]"], r"benchmark\.squad=None \(qa_1\).*download"),
        ("ruler", ["benchmark.tasks=[qa_2]", "benchmark.lengths=[3000]", f"benchmark.hotpotqa={QA}/squad_sample.json"],
         r"benchmark\.hotpotqa=.* is not of the form of HotpotQA"),
        ("ruler", ["benchmark.tasks=[qa_1]", "benchmark.lengths=[3000]", f"benchmark.squad={QA}/squad_sample.json"],
         r"has \d+ questions, benchmark\.samples=200; lower samples"),
    ],
)  # fmt: skip
def test_bad_input_is_named_before_weights_are_loaded(benchmark, overrides, message, data, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        job(data, benchmark, *(o.replace("{empty}", str(tmp_path)) for o in overrides), reply=None)
