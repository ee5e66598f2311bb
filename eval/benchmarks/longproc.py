"""LongProc (Ye et al. 2025, arXiv 2501.05414): procedures that are followed step by step through one long reply.

Rules of princeton-pli/LongProc 78e873a, longproc/ (Apache-2.0), written anew. Data: its folder data/, whose
prompts.yaml have the prompts. pseudo_to_code is refused, for its grader compiles and runs the reply; equations of
countdown are parsed here, officially they are evaluated as Python.
"""

import csv
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import yaml
from annotated_types import Ge, Le, Lt, MaxLen, MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank, digest, read_text
from leank.errors import in_one_line
from leank.eval.benchmarks.base import Row, benchmark, kept, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, checked, read
from leank.eval.metrics import searches
from leank.typed import Positive

TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}  # of a reply by size, as in the official example_usage.py
SIZES = {
    "html_to_tsv": ("0.5k", "2k", "8k"),
    "path_traversal": ("0.5k", "2k", "8k"),
    "tom_tracking": ("0.5k", "2k", "8k"),
    "countdown": ("0.5k", "2k", "8k"),
    "travel_planning": ("2k", "8k"),
}
TASKS = tuple(f"{kind}_{size}" for kind, sizes in SIZES.items() for size in sizes)
FIELDS = {  # of the prompts; the context ends with the first
    "html_to_tsv": ("html_str", "task_topic", "task_description", "filtering_instruction", "tsv_header"),
    "path_traversal": ("city_context", "src_city", "dst_city"),
    "tom_tracking": ("story", "question"),
    "countdown": ("demonstration", "nums", "target"),
    "travel_planning": ("demonstration", "problem"),
}
SHOWN = (([40, 19, 23, 7], 29), ([9, 16, 6, 18], 12))  # the problems of countdown's examples
ESTIMATED = {"2k": (0, 2048), "8k": (4096, 8192)}  # estimated_output_tokens of travel planning, from and below
PAGE = "html_str"  # where a line of html_to_tsv carries its page


class HtmlLine(TypedDict):
    """A page, and the table that is to be made of it."""

    html_path: NotBlank
    task_topic: str
    task_description: str
    filtering_instruction: str
    tsv_header: str
    gt: NotBlank
    website_id: NotRequired[str | None]


class PathLine(TypedDict):
    """Cities, where one leads from each, and the way between two of them."""

    context_nl: NotBlank
    question_repr: Annotated[list[str], MinLen(2), MaxLen(2)]
    answer_nl: NotBlank


class TomLine(TypedDict):
    """A story of agents and objects, and what one of them believes after each step."""

    story: NotBlank
    question: NotBlank
    solution: NotBlank


Number = Annotated[int, Ge(0), Lt(searches.LARGEST)]
Days = Annotated[int, Ge(1), Le(1000)]


class CountdownLine(TypedDict):
    """Four numbers, and the one that is to be made of them."""

    nums: Annotated[list[Number], MinLen(4), MaxLen(4)]
    target: Number


class Constraint(TypedDict):
    """How many days a city is visited, or from when to when."""

    type: Literal["duration", "fixed"]
    city: NotBlank
    num_days: NotRequired[Days]
    start_day: NotRequired[Days]
    end_day: NotRequired[Days]


class Trip(TypedDict):
    """Constraints, flights and the plan that they allow."""

    num_cities: Annotated[int, Ge(1), Le(100)]
    constraints: list[Constraint]
    connected_cities: list[Annotated[list[str], MinLen(2), MaxLen(2)]]
    disambig_question_text: NotBlank
    ground_truth_plan: NotBlank
    ground_truth_cities: NotBlank
    ground_truth_durations: NotBlank


class TravelLine(Trip):
    """A trip, and about how many tokens its search has."""

    estimated_output_tokens: int | float


TRIP: TypeAdapter[Any] = TypeAdapter(Trip)
SCHEMAS: dict[str, TypeAdapter[Any]] = {
    "html_to_tsv": TypeAdapter(HtmlLine),
    "path_traversal": TypeAdapter(PathLine),
    "tom_tracking": TypeAdapter(TomLine),
    "countdown": TypeAdapter(CountdownLine),
    "travel_planning": TypeAdapter(TravelLine),
}


@benchmark("longproc")
@dataclass
class LongProc(FromFiles):
    """LongProc; path: the folder data/ of its repository, with html_to_tsv/, path_traversal/ and so on."""

    tasks: Tasks = TASKS
    partial: bool = False  # score the share of the steps before the first wrong one, not whether all are right
    max_new_tokens: Positive | None = None  # of a reply; None takes the official 1,024, 3,072 or 9,216
    name: str = "longproc"
    _prompts: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)  # template and examples by kind

    schema = TypeAdapter(dict[str, Any])  # `lines` checks each task's own
    counted = ("partial", "max_new_tokens")

    def wanted(self) -> Sequence[str]:
        for task in self.tasks:
            if task.startswith("pseudo_to_code"):
                raise ValueError(
                    f"benchmark.tasks: {task!r} is graded by compiling and running replies, which is not done here; "
                    "leave it out"
                )
        return known_tasks(self.tasks, TASKS, "is no task of LongProc")

    def lines(self, task: str) -> Iterator[Line]:
        """Yield a task's lines, and keep its prompt. Raises FileNotFoundError for a file that is not there."""
        kind, size = split(task)
        if self.path is None:
            raise FileNotFoundError(
                "LongProc: no path= given; clone https://github.com/princeton-pli/LongProc and pass path=<its data>"
            )
        folder = Path(self.path) / kind
        if not folder.is_dir():
            raise FileNotFoundError(
                f"LongProc: no {kind}/ in benchmark.path={self.path}; give the official folder data"
            )
        self._prompts[kind] = template(folder, kind), examples(folder, kind)
        name = "travel_planning_all" if kind == "travel_planning" else task
        low, high = ESTIMATED.get(size, (0, 0))
        for line in checked(read(f"LongProc {task}", name, folder, Hub("", f"{name}.json")), SCHEMAS[kind]):
            if kind == "html_to_tsv":
                yield replace(line, data={**line.data, PAGE: page(folder, line)})
            elif kind != "travel_planning" or low <= line.data["estimated_output_tokens"] < high:
                yield line

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        return digest(repr(self._prompts[split(task)[0]]) + super()._known_by(task, lines))

    def build(self, task: str, data: Any) -> Row:
        kind, size = split(task)
        prompt, shown = self._prompts[kind]
        values, answers = BUILT[kind](data)
        context, question = filled(prompt, {**values, "demonstration": shown}, FIELDS[kind][0])
        return Row(
            task=task,
            id="",
            context=context,
            question=question,
            answers=answers,
            max_new_tokens=self.max_new_tokens or TOKENS[size],
            metric="longproc_partial" if self.partial else "longproc",
            meta=kept(data, "website_id"),
        )

    def right(self, row: Row) -> Sequence[str]:
        around = {"html_to_tsv": "```tsv\n{}\n```", "path_traversal": "<Route>\n{}\n</Route>"}
        return [around.get(split(row.task)[0], "{}").format(row.answers[0])]


def split(task: str) -> tuple[str, str]:
    """The kind and the size of a task, such as path_traversal and 2k."""
    kind, _, size = task.rpartition("_")
    return kind, size


def template(folder: Path, kind: str) -> str:
    """The prompt of prompts.yaml. Raises ValueError if it has fields other than the official ones."""
    file = folder / "prompts.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"LongProc: no prompts.yaml in {folder}; give the official folder data")
    try:
        prompt = yaml.safe_load(read_text(file))["USER_PROMPT"]
        parts = list(string.Formatter().parse(prompt))
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} has no USER_PROMPT that can be read: {in_one_line(str(error))}; copy it again"
        ) from None
    found = [name + "".join(f"{mark}{text}" for mark, text in (("!", how), (":", spec)) if text)
             for _, name, spec, how in parts if name is not None]  # fmt: skip
    if sorted(found) != sorted(FIELDS[kind]):
        raise ValueError(f"{file}: its fields are {', '.join(found)}, not {', '.join(FIELDS[kind])}; copy it again")
    return str(prompt)


def filled(prompt: str, values: Mapping[str, object], last: str) -> tuple[str, str]:
    """What the prompt says up to the field `last`, and after it."""
    context, said = "", ""
    for text, name, _, _ in string.Formatter().parse(prompt):
        said += text + str(values[name] if name else "")
        if name == last:
            context, said = said, ""
    return context, said


def page(folder: Path, line: Line) -> str:
    """The HTML of a line. Raises ValueError for a file outside the folder, which a made-up line could name."""
    file = folder / line.data["html_path"]
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        raise line.error(f"html_path={line.data['html_path']!r} is no file in {folder}")
    return read_text(file)


def examples(folder: Path, kind: str) -> str:
    """The solved problems that a prompt shows; none but for the two searches."""
    if kind == "countdown":
        solved = [(f"Numbers: {nums}\nTarget: {target}", searches.countdown(nums, target)) for nums, target in SHOWN]
    elif kind == "travel_planning":
        name = "travel_planning_icl_examples"
        solved = []
        for line in checked(read(f"LongProc {name}", name, folder, Hub("", f"{name}.json")), TRIP):
            try:
                solved.append((line.data["disambig_question_text"], searches.travel(line.data)))
            except ValueError as error:
                raise line.error(str(error)) from None
    else:
        return ""
    return "\n\n".join(f"# Example\n{problem}\n\n{solution}" for problem, solution in solved)


Built = tuple[dict[str, object], list[Any]]  # the fields of a prompt, and what its scorer compares with


def _html(data: Any) -> Built:
    return data, [data["gt"]]


def _path(data: PathLine) -> Built:
    start, end = data["question_repr"]
    return {"city_context": data["context_nl"], "src_city": start, "dst_city": end}, [data["answer_nl"]]


def _tom(data: Any) -> Built:
    if not beliefs(data["solution"]):
        raise ValueError("its solution has no line that begins with -")
    return data, [data["solution"]]


def _countdown(data: Any) -> Built:
    return data, [searches.countdown(data["nums"], data["target"]), data["nums"], data["target"]]


def _travel(data: TravelLine) -> Built:
    days = [int(text) for text in data["ground_truth_durations"].split("**")]
    answers = [searches.travel(data), data["ground_truth_cities"].split("**"), days]
    return {"problem": data["disambig_question_text"]}, answers


BUILT: dict[str, Callable[[Any], Built]] = {"html_to_tsv": _html, "path_traversal": _path, "tom_tracking": _tom,
                                            "countdown": _countdown, "travel_planning": _travel}  # fmt: skip


@metric("longproc")
def score(row: Row, reply: str) -> float:
    """Whether the reply is right, 0 or 1; of html_to_tsv the F1 of its lines, 0-1."""
    return SCORED[split(row.task)[0]](row.answers, reply)[0]


@metric("longproc_partial")
def score_partial(row: Row, reply: str) -> float:
    """How much of the reply is right before its first wrong step, 0-1; of html_to_tsv the F1 of its lines."""
    return SCORED[split(row.task)[0]](row.answers, reply)[1]


Scores = tuple[float, float]  # the official accuracy and partial_accuracy


def tagged(reply: str, tag: str) -> str | None:
    """What stands between the first <tag> and the first </tag>; None without both."""
    start, end = reply.find(f"<{tag}>"), reply.find(f"</{tag}>")
    return None if -1 in (start, end) else reply[start + len(tag) + 2 : end].strip()


def plain(text: str, dropped: str = "a|an|the") -> str:
    """The text in lower case without punctuation and without the dropped words, its words set apart by one blank."""
    letters = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(rf"\b({dropped})\b", " ", letters).split())


PUNCTUATION = str.maketrans("", "", string.punctuation)


def score_html(answers: Sequence[Any], reply: str) -> Scores:
    """F1 of the lines of ```tsv ... ```, or of the whole reply: shares of either table's lines that the other has.

    Lines may have any order, and repeated ones count each time; cells are equal as `plain` texts without blanks. The
    first line is not compared. A line of another width counts as one of N/A, and is left out where it is the last. The
    score is 0 if the tables' widths differ, a column's name stands twice, or nothing follows the first line.
    """
    block = re.search(r"```tsv([\s\S]*)```", reply)
    given = block[1] if block else reply.split("```tsv")[1] if "```tsv" in reply else reply
    try:
        mine, wanted = table(given), table(answers[0])
    except csv.Error:
        return 0.0, 0.0
    if not mine or not wanted or len(mine[0]) != len(wanted[0]):
        return 0.0, 0.0
    precision = sum(map(set(wanted).__contains__, mine)) / len(mine)
    recall = sum(map(set(mine).__contains__, wanted)) / len(wanted)
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return f1, f1


def table(text: str) -> list[tuple[str, ...]]:
    """The lines behind the first of a table, normalised; none if it is none. Raises csv.Error."""
    header, *lines = list(csv.reader(text.strip().split("\n"), delimiter="\t"))
    if lines and len(lines[-1]) != len(header):
        lines.pop()
    if len(set(header)) < len(header):
        return []
    fitting = (line if len(line) == len(header) else ["N/A"] * len(header) for line in lines)
    return [tuple(plain(cell).replace(" ", "") for cell in line) for line in fitting]


def score_path(answers: Sequence[Any], reply: str) -> Scores:
    """Whether the text between <Route> and </Route> is the route; the share of its lines up to the first wrong one.

    The first wrong line counts as a right one, as officially.
    """
    truth, route = answers[0].strip(), tagged(reply, "Route")
    if route is None:
        return 0.0, 0.0
    if route == truth:
        return 1.0, 1.0
    wanted = truth.split("\n")
    pairs = list(zip(wanted, route.split("\n"), strict=False))
    return 0.0, (first_wrong(pairs, len(pairs) - 1) + 1) / len(wanted)


def first_wrong(pairs: Sequence[tuple[str, str]], none: int) -> int:
    """The place of the first pair that differs; `none` without one."""
    return next((place for place, (one, two) in enumerate(pairs) if one != two), none)


def score_tom(answers: Sequence[Any], reply: str) -> Scores:
    """Whether the lines that begin with - are those of the solution; the share of its lines before the first wrong."""
    given, wanted = beliefs(reply), beliefs(answers[0])
    if given == wanted:
        return 1.0, 1.0
    pairs = list(zip(given, wanted, strict=False))
    return 0.0, first_wrong(pairs, len(pairs)) / len(wanted)


def beliefs(text: str) -> list[str]:
    """The lines that begin with -, normalised; such a line with blanks before it counts as the first one alone."""
    listed = "\n".join(line for line in text.splitlines() if line.strip().startswith("-")).strip()
    lines = [line[1:].replace("’", "") for line in listed.split("\n") if line.startswith("-")]
    return [said for line in lines if (said := plain(line, BELIEF))]


BELIEF = "a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief"


def score_countdown(answers: Sequence[Any], reply: str) -> Scores:
    """Whether the equations between <Solution> and </Solution> make the target of the numbers.

    Else, how many lines of the official search stand before the first wrong one, behind "# Search Procedure" and an
    equal first line: a line that picks numbers has to be equal, one that tries an operation has to try the same and
    drop it or not alike. A search without a wrong line lacks one line, as officially.
    """
    procedure, nums, target = answers
    solution = tagged(reply, "Solution")
    if solution is not None and solves(solution, nums, target):
        return 1.0, 1.0
    if "# Search Procedure" not in reply:
        return 0.0, 0.0
    truth = procedure.split("# Search Procedure")[-1].split("Now we have found the target")[0]
    given, wanted = (text.strip().split("\n") for text in (reply.split("# Search Procedure")[-1], truth))
    if given[0] != wanted[0]:
        return 0.0, 0.0
    pairs = list(zip(given[1:], wanted[1:], strict=False))
    wrong = next((place for place, pair in enumerate(pairs) if not alike(*pair)), len(pairs) - 1)
    return 0.0, max(0, wrong) / (len(wanted) - 1)


def alike(line: str, wanted: str) -> bool:
    """Whether a line of a search of countdown does what the official one does."""
    if line == wanted or "Pick two numbers" in wanted:
        return line == wanted
    dropped = ["drop this branch" in text for text in (line, wanted)]
    return line.split("=")[0] == wanted.split("=")[0] and dropped[0] == dropped[1]


INTEGER = r"(?:0(?:_?0)*|[1-9](?:_?[0-9])*)"  # of Python
EQUATION = re.compile(rf"(-?{INTEGER})[ \t\f]*\+[ \t\f]*(-?{INTEGER})|({INTEGER})[ \t\f]*([-*/])[ \t\f]*({INTEGER})")


def solves(solution: str, nums: Sequence[int], target: int) -> bool:
    """Whether three lines "a + b = c", with + - * /, take numbers that are there, and leave the target.

    What Python, which officially evaluates a + b, would not read as that is wrong.
    """
    held, lines = list(nums), solution.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        left, sign, right = line.strip().partition("=")
        found = EQUATION.fullmatch(left.rstrip(" \t\f"))
        if not sign or "=" in right or found is None:
            return False
        sign = found[4] or "+"
        try:
            one, two, result = int(found[1] or found[3]), int(found[2] or found[5]), int(right)
            made = {"+": one + two, "-": one - two, "*": one * two}[sign] if sign != "/" else one / two
        except (ValueError, ArithmeticError):
            return False
        if made != result:
            return False
        for number in (one, two):
            if number not in held:
                return False
            held.remove(number)
        held.append(result)
    return held[0] == target


def score_travel(answers: Sequence[Any], reply: str) -> Scores:
    """Whether the plan between <Plan> and </Plan> has the cities and days of the trip's own, in their order.

    Else, the share of the lines of the official search before the first that the reply's line does not hold, both from
    "<Solving Procedure>" on, as `plain` texts and without empty ones. A search without a wrong line lacks one line, as
    officially.
    """
    procedure, cities, days = answers
    plan, own = tagged(reply, "Plan"), list(zip(cities, days, strict=False))
    if plan is not None and stops(plan)[: len(own)] == own:
        return 1.0, 1.0
    given, wanted = (steps(text) for text in (reply, procedure))
    pairs = list(zip(given, wanted, strict=False))
    wrong = next((place for place, (line, truth) in enumerate(pairs) if truth not in line), len(pairs) - 1)
    return 0.0, max(0, wrong) / len(wanted)


def steps(text: str) -> list[str]:
    """The lines of a search of travel planning."""
    text = text.replace("Output the plan in the required format:", "")
    mark = "<Solving Procedure>"
    text = mark + text.split(mark)[1] if mark in text else text
    return [plain(line) for line in text.strip().split("\n") if line.strip()]


FLIGHT = re.compile(r"from (\w+) to (\w+)")


def stops(plan: str) -> list[tuple[str, int]]:
    """The cities of a plan and their days, by NATURAL PLAN's rule: from flights on "Day N ... from A to B".

    A city is one word. The last day is that of the last "N-M". None without a flight and a "N-M".
    """
    last, total, flights = None, None, []
    try:
        for line in plan.split("\n"):
            if said := re.search(r"European cities for (\d+) days", line):
                total = int(said[1])
            if visit := re.search(r"(?<!\d)\d+-(\d+)", line):
                last = int(visit[1])
                if last == total:
                    break
            if flight := flown(line):
                flights.append(flight)
    except ValueError:  # a day of more digits than Python takes
        return []
    if last is None or not flights:
        return []
    days = [1, *(day for day, _, _ in flights), last]
    cities = [flights[0][1], *(city for _, _, city in flights)]
    return [(city, days[place + 1] - days[place] + 1) for place, city in enumerate(cities)]


def flown(line: str) -> tuple[int, str, str] | None:
    r"""What ".*Day (\d+).*from (\w+) to (\w+)" finds, in time that grows with the line and not with its cube."""
    at = len(line)
    while (at := line.rfind("from ", 0, at)) != -1:
        if way := FLIGHT.match(line, at):
            days = re.findall(r"Day (\d+)", line[:at])
            return (int(days[-1]), way[1], way[2]) if days else None
    return None


SCORED: dict[str, Callable[[Sequence[Any], str], Scores]] = {
    "html_to_tsv": score_html,
    "path_traversal": score_path,
    "tom_tracking": score_tom,
    "countdown": score_countdown,
    "travel_planning": score_travel,
}
