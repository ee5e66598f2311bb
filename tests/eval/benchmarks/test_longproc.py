"""LongProc: prompts of its official files, and scores by the official rules on vectors made by hand."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.benchmarks import longproc
from leank.eval.benchmarks.base import score_row
from leank.eval.benchmarks.longproc import TASKS, LongProc
from leank.eval.metrics import searches
from tests.helpers.benchmark_lines import CONFIG
from tests.helpers.longproc import HTML, TOM, TRIP, countdown, path, write

MADE = ("html_to_tsv_0.5k", "path_traversal_0.5k", "tom_tracking_0.5k", "countdown_0.5k", "travel_planning_2k")


def rows(folder, tokenizer, tasks, **given):
    """All rows of a benchmark that is checked."""
    benchmark = LongProc(str(folder), tasks=tasks, **given)
    benchmark.check(CONFIG, tokenizer, 0, None)
    return [benchmark.row(cell, sample, tokenizer, 0) for cell in benchmark.cells() for sample in cell.samples]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("longproc"))


def test_prompts_are_those_of_the_files(folder, tokenizer):
    """The context ends with the page, the cities, the story or the examples; of travel planning one size is taken."""
    found = rows(folder, tokenizer, MADE)
    assert [row.task for row in found] == [t for t in MADE for _ in range(1 + t.startswith(("path", "count")))]
    html, way, _, tom, numbers, _, trip = found
    assert html.context == "Page:\n<li>Oak 30 m<li>Elm 20 m<li>Yew"
    assert html.question == "\ntrees: (1) name; (2) height\nname\theight\n{TSV}"
    start, end = path(1)["question_repr"]
    assert way.prompt == f"Cities:\n{path(1)['context_nl']}\nFrom {start} to {end}?"
    assert way.context.endswith(path(1)["context_nl"])
    assert tom.question == f"\nQuestion: {TOM['question']}"
    sample = countdown(1)
    assert numbers.question == f"\nNumbers: {sample['nums']}\nTarget: {sample['target']}"
    assert numbers.context.startswith(
        "Examples:\n# Example\nNumbers: [40, 19, 23, 7]\nTarget: 29\n\n# Search Procedure"
    )
    assert trip.context == f"Examples:\n# Example\nVisit three cities.\n\n{searches.travel(TRIP)}"
    assert [row.max_new_tokens for row in (html, trip)] == [1024, 3072]
    assert html.meta == {"website_id": "W1"}


SEARCH = """# Search Procedure
Initial number set: [3, 1, 2, 4], target: 9. Options for choosing two numbers: [(3, 1), (3, 2), (3, 4), (1, 2), (1, 4), (2, 4)].
 |- Pick two numbers (3, 1) (numbers left: [2, 4]). Try possible operations.
  |- Try 3 + 1 = 4. Add 4 to the number set. Current number set: [4, 2, 4], target: 9. Options for choosing two numbers: [(4, 2), (4, 4), (2, 4)].
   |- Pick two numbers (4, 2) (numbers left: [4]). Try possible operations.
    |- Try 4 + 2 = 6. Add 6 to the number set. Current number set: [6, 4], target: 9, just two numbers left.
     |- Try 6 + 4 = 10. Evaluate 10 != 9, drop this branch.
     |- Try 6 - 4 = 2. Evaluate 2 != 9, drop this branch.
     |- Try 6 * 4 = 24. Evaluate 24 != 9, drop this branch.
     |- Try 6 / 4 = 1.5. 1.5 is a decimal, drop this branch.
    |- Try 4 - 2 = 2. Add 2 to the number set. Current number set: [2, 4], target: 9, just two numbers left.
"""  # noqa: E501


def test_the_search_of_countdown_is_told_as_officially():
    told = searches.countdown([3, 1, 2, 4], 9)
    assert told.startswith(SEARCH)
    *_, first, second, third, end, last = told.split("\n")
    assert (end, last) == ("</Solution>", "")
    assert f"Final step: {third}\nThe step before: {second}\nThe first step: {first}\n\n" in told
    told = searches.countdown([50, 50, 3, 4], 25)
    assert "     |- Try 4 / 0 (invalid operation). drop this branch.\n" in told
    assert "  |- Try 50 * 50 = 2500. 2500 exceeds the maximum intermediate result, drop this branch.\n" in told
    with pytest.raises(ValueError, match=r"nums=\[1, 1, 1, 1\] do not lead to target=1999"):
        searches.countdown([1, 1, 1, 1], 1999)


PLAN = """<Solving Procedure>
Read the requirements and identify the cities that have fixed schedules and the cities that need to be arranged.
* City: Oslo, Duration: 3 days.
* City: Rome, Duration: 2 days.
* City: Bern, Duration: 4 days, Fixed Schedule: Day 3 - 6.

Cities that have fixed schedules (sorted by their arrival days):
* City: Bern, Fixed Schedule: Day 3 - 6.

Cities needing arrangement:
* City: Oslo, Duration: 3 days.
* City: Rome, Duration: 2 days.

Current day: 1. Current plan: [].
Check whether the city with an arrival day of Day 1 - is fixed.
No. Consider possible options from cities needing arrangement: [Oslo, Rome] and explore these options in order.
 |- Try arranging to visit Oslo from Day 1. Duration: 3 days. Schedule: Day 1 - 3.
 |- Check for direct flight from the starting point to Oslo.
 |- Yes.
 |- Check whether this arrangement is compatible with the next fixed schedule after Day 1: Bern (Day 3 - 6).
 |- The departure day of Oslo is Day 3. The arrival day of Bern is Day 3. Day 3 is not later than (<=) Day 3. This arrangement is compatible.
 |- This arrangement is feasible for now. Continue to arrange the rest of the plan.
  |- Current day: 3. Current plan: [Oslo].
  |- Check whether the city with an arrival day of Day 3 - is fixed.
  |- Yes. The city with an arrival day of Day 3 - is fixed: Bern.
   |- Try arranging to visit Bern from Day 3. Duration: 4 days. Schedule: Day 3 - 6.
   |- Check for direct flight from Oslo to Bern.
   |- Yes.
   |- Check whether this arrangement is compatible with the next fixed schedule after Day 3: None.
   |- No following fixed schedules. This arrangement is compatible.
   |- This arrangement is feasible for now. Continue to arrange the rest of the plan.
    |- Current day: 6. Current plan: [Oslo, Bern].
"""  # noqa: E501


def test_the_search_of_travel_planning_is_told_as_officially():
    told = searches.travel(TRIP)
    assert told.startswith(PLAN)
    plan = TRIP["ground_truth_plan"].split("\n\n")[1]
    ending = (
        "All 3 cities are arranged. Complete plan is found!\n</Solving Procedure>\n\nOutput the plan in the required"
    )
    assert told.endswith(f"      |- {ending} format:\n<Plan>\n{plan}\n</Plan>")
    dropped = searches.travel({**TRIP, "constraints": [TRIP["constraints"][i] for i in (1, 0, 2, 3)]})
    assert "\n   |- Check for direct flight from Rome to Oslo.\n   |- Yes.\n" in dropped
    assert "Day 4 is later than (>) Day 3. This arrangement is incompatible. Drop this branch.\n" in dropped
    assert "\n   |- Fail to arrange any option on day 2 in the current arrangement. Drop this branch.\n" in dropped
    for wrong in ({"connected_cities": []}, {"ground_truth_plan": "Oslo, then Bern"}):
        with pytest.raises(ValueError, match="another plan"):
            searches.travel({**TRIP, **wrong})


ROUTE = path(1)["answer_nl"].split("\n")  # seven lines
BELIEFS = TOM["solution"].split("\n")
NUMBERS = {"nums": [3, 1, 2, 4], "target": 9}
LINES = searches.countdown(**NUMBERS).split("\n\n")[0].split("\n")[1:]
TOLD = [line for line in searches.travel(TRIP).split("\n") if line and "Output the plan" not in line]
GIVEN = "<Plan>\n{}\n</Plan>"
# task, reply, accuracy, partial accuracy: worked out by the rules of the official code, and what that gives
VECTORS = [
    ("html_to_tsv", f"```tsv\n{HTML['gt']}\n```", 1, 1),
    ("html_to_tsv", "x\ty\noak!\t30M\nELM\t20 m\nyew\tn/a", 1, 1),  # the first line is not compared
    ("html_to_tsv", "```tsv\nname\theight\nYew\tN/A\nOak\t30 m", 0.8, 0.8),  # 2 of 2 and 2 of 3
    ("html_to_tsv", "```tsv\nname\theight\nYew\tN/A\nYew\tN/A\nAsh\t5\nThat is all.\n```", 4 / 9, 4 / 9),  # 2/3, 1/3
    ("html_to_tsv", "name\theight\nOak\nOak\t30 m", 0.4, 0.4),  # a line of another width is one of N/A
    ("html_to_tsv", "name\tname\nOak\t30 m", 0, 0),
    ("html_to_tsv", "name\nOak", 0, 0),
    ("html_to_tsv", "name\theight", 0, 0),
    ("html_to_tsv", "name\theight\nO\rak\t30 m", 0, 0),  # no table to Python's csv
    ("html_to_tsv", "", 0, 0),
    ("path_traversal", "So <Route>\n{}\n\n</Route> it is.".format("\n".join(ROUTE)), 1, 1),
    ("path_traversal", "<Route>{}</Route>".format("\n".join([*ROUTE[:3], "x", *ROUTE[4:]])), 0, 4 / 7),
    ("path_traversal", "<Route>{}</Route>".format("\n".join(ROUTE[:3])), 0, 3 / 7),
    ("path_traversal", "<Route>{}</Route>".format("\n".join([*ROUTE, "x"])), 0, 1),
    ("path_traversal", "<Route></Route>", 0, 1 / 7),  # the first wrong line counts
    ("path_traversal", "<Route>{}".format("\n".join(ROUTE)), 0, 0),
    ("path_traversal", "</Route><Route>{}".format("\n".join(ROUTE)), 0, 1 / 7),
    ("tom_tracking", TOM["solution"], 1, 1),
    ("tom_tracking", "\n".join(BELIEFS[1:3]).lower().replace("ada's", "Ada’s").replace("the ", ""), 1, 1),
    ("tom_tracking", BELIEFS[1], 0, 0.5),
    ("tom_tracking", "\n".join([*BELIEFS[1:3], "- Step 2"]), 0, 1),
    ("tom_tracking", "\n".join([BELIEFS[1], f" {BELIEFS[2]}"]), 0, 0.5),  # an indented line is none
    ("tom_tracking", "\n".join([f" {BELIEFS[1]}", BELIEFS[2]]), 1, 1),  # but for the first
    ("tom_tracking", "\n".join([BELIEFS[2], BELIEFS[1]]), 0, 0),
    ("countdown", "<Solution>\n3 * 2 = 6\n6 + 4 = 10\n10 - 1 = 9\n</Solution>", 1, 1),
    ("countdown", "<Solution> 4 / 2=2\n 3 *2= +2\n1 + 2 = 3</Solution>", 0, 0),
    ("countdown", "<Solution>4 / 2 = 2\n2 + 1 = 3\n3 * 3 = 9</Solution>", 1, 1),
    ("countdown", "<Solution>4 / 2 = 2\n2 + 1 = 3\n\n3 * 3 = 9</Solution>", 0, 0),  # four lines
    ("countdown", "<Solution>4 / 2 = 2.0\n2 + 1 = 3\n3 * 3 = 9</Solution>", 0, 0),
    ("countdown", "<Solution>4 + 2 = 6\n6 + 3 = 9\n9 * 1 = 9</Solution>", 1, 1),
    ("countdown", "<Solution>4 + 2 = 6\n6 + 3 = 9\n9 + 0 = 9</Solution>", 0, 0),  # 0 is none of the numbers
    ("countdown", "<Solution>2 - 4 = -2\n-2 + 3 = 1\n1 * 1 = 9</Solution>", 0, 0),
    ("countdown", "<Solution>(4 - 1) * 3 = 9\n1 = 1\n1 = 1</Solution>", 0, 0),
    ("countdown", "\n".join(["# Search Procedure", *LINES]), 0, (len(LINES) - 2) / (len(LINES) - 1)),
    ("countdown", "\n".join(["# Search Procedure", *LINES[:4]]), 0, 2 / (len(LINES) - 1)),
    ("countdown", "\n".join(["# Search Procedure", LINES[0]]), 0, 0),
    ("countdown", "\n".join(["# Search Procedure", *LINES[1:]]), 0, 0),
    ("countdown", "\n".join(["# Search Procedure", *LINES[:3], LINES[3] + " "]), 0, 2 / (len(LINES) - 1)),
    ("countdown", "\n".join(["# Search Procedure", LINES[0], LINES[1] + " ", *LINES[2:]]), 0, 0),
    ("countdown", "\n".join(LINES), 0, 0),
    ("travel_planning", GIVEN.format("Day 1-3\nDay 3 from Oslo to Bern\nDay 6, from Bern to Rome\n6-7"), 1, 1),
    ("travel_planning", GIVEN.format("Day 3 from Oslo to Bern\nDay 5, from Bern to Rome\n6-7"), 0, 0),
    ("travel_planning", GIVEN.format("Day 3 from Oslo to Bern\nDay 6, from Bern to Rome"), 0, 0),  # no last day
    ("travel_planning", "Day 1-3\nDay 3 from Oslo to Bern\nDay 6, from Bern to Rome\n6-7", 0, 0),
    ("travel_planning", "\n".join(TOLD), 1, 1),
    ("travel_planning", "\n\n".join(TOLD[:10]).upper(), 0, 9 / len(TOLD)),
    ("travel_planning", "Well.\n" + "\n\n".join(f"{line} indeed" for line in TOLD[:10]), 0, 9 / len(TOLD)),
    ("travel_planning", "\n".join([*TOLD[:10], "x", *TOLD[11:-7]]), 0, 10 / len(TOLD)),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(folder):
    """A row of each kind."""
    benchmark = LongProc(str(folder))
    lines = {task.rpartition("_")[0]: (task, next(iter(benchmark.lines(task)))) for task in MADE}
    found = {kind: benchmark.build(task, line.data) for kind, (task, line) in lines.items()}
    return found | {"countdown": benchmark.build("countdown_0.5k", NUMBERS)}


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_replies_are_scored_by_the_official_rules(number, made):
    kind, reply, accuracy, partial = VECTORS[number]
    row = made[kind]
    assert longproc.score(row, reply) == pytest.approx(accuracy)
    assert longproc.score_partial(row, reply) == pytest.approx(partial)


def test_partial_scores_are_asked_for(folder, tokenizer):
    tasks = ["path_traversal_0.5k"]
    for partial, found in ((False, 0), (True, 3 / 7)):
        row = rows(folder, tokenizer, tasks, partial=partial)[0]
        assert score_row(row, "<Route>{}</Route>".format("\n".join(ROUTE[:3]))) == found


HOSTILE = [
    "__import__('os').abort() = 1", "().__class__ = 1", "3 ** 9 ** 9 ** 9 = 1", "9" * 5000 + " + 1 = 1", "3 / 0 = 0",
    "3 + 1 = " + "9" * 5000, "1_0 + 1 = 11", "03 + 1 = 4", "٣ + 1 = 4", "3 +\u00a01 = 4", "3 + 1 = 4 = 4", "= 4",
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE)
def test_what_stands_for_an_equation_is_read_and_never_run(line):
    assert not longproc.solves(f"{line}\n4 + 4 = 8\n8 + 2 = 10", [3, 1, 2, 4], 10)


def test_a_reply_that_repeats_itself_is_scored_in_time(made):
    replies = ["Day 1 " * 20_000, "from a " * 20_000, "1" * 60_000, "from a to b Day 1" * 9_000, "\t" * 60_000,
               "```tsv" * 9_000, "- a\n" * 20_000, "<Route>" * 9_000]  # fmt: skip
    start = time.perf_counter()
    for row in made.values():
        for reply in replies:
            for text in (
                reply,
                f"<Plan>{reply}</Plan>",
                f"<Solution>{reply}</Solution>",
                f"# Search Procedure\n{reply}",
            ):
                assert longproc.score(row, text) == 0
    assert time.perf_counter() - start < 60  # by backtracking it would take hours


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_reply_breaks_a_scorer(made, data):
    row = made[data.draw(st.sampled_from(sorted(made)))]
    pieces = [*row.answers[0].split("\n"), "\t", '"', "```tsv", "<Route>", "</Route>", "<Plan>", "</Plan>",
              "<Solution>", "</Solution>", "# Search Procedure", "<Solving Procedure>", "1-2", "\r", "-"]  # fmt: skip
    reply = data.draw(st.sampled_from(["", "\n", " "])).join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    for score in (longproc.score, longproc.score_partial):
        assert 0 <= score(row, reply) <= 1


def test_tasks_that_run_replies_are_refused_by_name(folder, tokenizer):
    with pytest.raises(ValueError, match=r"'pseudo_to_code_2k' is graded by compiling and running replies"):
        rows(folder, tokenizer, [*TASKS, "pseudo_to_code_2k"])
    with pytest.raises(ValueError, match="'chess' is no task of LongProc"):
        rows(folder, tokenizer, ["chess"])
    with pytest.raises(FileNotFoundError, match="no path= given"):
        LongProc().check(CONFIG, tokenizer, 0, None)


@pytest.mark.parametrize(
    ("kind", "file", "change", "said"),
    [
        ("html_to_tsv", "html_to_tsv_0.5k", {"html_path": "../../secret"}, "is no file in"),
        ("html_to_tsv", "html_to_tsv_0.5k", {"html_path": "webpage/W2.html"}, "is no file in"),
        ("html_to_tsv", "html_to_tsv_0.5k", {"gt": "name\tname\nOak\t1"}, "its own answer"),
        ("path_traversal", "path_traversal_0.5k", {"question_repr": ["Arden"]}, "question_repr"),
        ("tom_tracking", "tom_tracking_0.5k", {"solution": "In the hall."}, "no line that begins with -"),
        ("countdown", "countdown_0.5k", {"nums": [1, 2, 3]}, "at least 4 items"),
        ("countdown", "countdown_0.5k", {"nums": [1, 1, 1, 1], "target": 99}, "do not lead to target=99"),
        ("countdown", "countdown_0.5k", {"nums": [10**400, 1, 1, 1]}, "less than 2000"),
        ("travel_planning", "travel_planning_all", {"ground_truth_plan": "None"}, "lead to another plan"),
        ("travel_planning", "travel_planning_all", {"constraints": [{"type": "duration", "city": "Oslo"}]},
         "a constraint has no 'num_days'"),
        ("travel_planning", "travel_planning_icl_examples", {"ground_truth_plan": "None"}, "lead to another plan"),
        ("travel_planning", "travel_planning_all", {"ground_truth_durations": "3**x**2"}, "invalid literal"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(kind, file, change, said, tmp_path, tokenizer):
    where = write(tmp_path) / kind / f"{file}.json"
    (tmp_path.parent / "secret").write_text("a key")
    first = json.loads(where.read_text())[0]
    where.write_text(json.dumps([{**first, **change}]))
    task = next(task for task in MADE if task.startswith(kind))
    with pytest.raises(ValueError, match="line 1: ") as caught:
        rows(tmp_path, tokenizer, [task])
    assert str(caught.value).startswith(f"{where}, line 1: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("{story} {question.__class__}", "its fields are story, question.__class__, not story, question"),
        ("{story!r} {question}", "its fields are story!r, question, not"),
        ("{story}", "its fields are story, not"),
        ("{story} {question} {", "has no USER_PROMPT that can be read"),
        (["{story}"], "has no USER_PROMPT that can be read"),
    ],
)
def test_a_prompt_with_other_fields_is_refused(prompt, said, tmp_path, tokenizer):
    file = write(tmp_path) / "tom_tracking" / "prompts.yaml"
    file.write_text(json.dumps({"USER_PROMPT": prompt}))
    with pytest.raises(ValueError, match="copy it again") as caught:
        rows(tmp_path, tokenizer, ["tom_tracking_0.5k"])
    assert said in str(caught.value)
    file.write_text("!!python/object/apply:os.abort []")
    with pytest.raises(ValueError, match="has no USER_PROMPT that can be read"):
        rows(tmp_path, tokenizer, ["tom_tracking_0.5k"])
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"no prompts\.yaml in"):
        rows(tmp_path, tokenizer, ["tom_tracking_0.5k"])
