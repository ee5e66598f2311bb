"""BABILong: facts about people, places and things, hidden sentence by sentence in long prose (bAbI qa1 to qa5).

Source: booydar/babilong 7a6efee, prompts.py and metrics.py (Apache-2.0; prompts unchanged in assets/babilong.json).
Data: RMT-team/babilong from the hub, or a folder of files such as qa1/4k.json or qa1_4k.jsonl.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, asset, from_hub, read

REPO = "RMT-team/babilong"
TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
PROMPTS: dict[str, dict[str, str]] = asset("babilong")  # of each task instruction, examples and post_prompt
LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M", "10M")
PLACES = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
LABELS = {
    **dict.fromkeys(TASKS, PLACES),
    "qa5": frozenset({"bill", "fred", "jeff", "mary", "apple", "football", "milk"}),
}


class BabiLongLine(TypedDict):
    """A line of the data set."""

    input: NotBlank
    question: NotBlank
    target: NotBlank


@benchmark("babilong")
@dataclass
class BabiLong(FromFiles):
    """BABILong; its cells are named qa1_4k and so on.

    path: a folder of files QA/LENGTH.json or QA_LENGTH.jsonl (.gz too).
    """

    tasks: Tasks = TASKS  # of qa1 to qa5
    # the data set's own names, about so many tokens
    lengths: Annotated[Sequence[str], MinLen(1)] = ("4k", "8k", "16k", "32k")
    name: str = "babilong"

    schema = TypeAdapter(BabiLongLine)

    def wanted(self) -> Sequence[str]:
        known_tasks(self.tasks, TASKS, "is not in BABILong")
        for length in self.lengths:
            if length not in LENGTHS:
                raise ValueError(f"benchmark.lengths: BABILong has no {length!r}; choose from {', '.join(LENGTHS)}")
        return [f"{task}_{length}" for length in self.lengths for task in self.tasks]

    def lines(self, task: str) -> Iterator[Line]:
        name, length = task.split("_")
        if self.path is None:
            return from_hub(f"BABILong {task}", REPO, length, name, f"Pass path=<a folder with {name}/{length}.json>")
        return read(f"BABILong {task}", task, self.path, Hub(REPO, str(Path(name, f"{length}.json"))))

    def build(self, task: str, data: BabiLongLine) -> Row:
        """Build a row of one line with the official prompt: instruction, examples, format, context and question."""
        name = task.split("_")[0]
        if data["target"].lower() not in LABELS[name]:
            raise ValueError(f"target={data['target']!r} is none of {', '.join(sorted(LABELS[name]))}")
        parts = PROMPTS[name]
        start = f"{parts['instruction']}\n\n{parts['examples']}\n\n{parts['post_prompt']}"
        return Row(
            task=task,
            id="",
            context=f"{start}\n\n<context>\n{data['input'].strip()}\n</context>\n\n",
            question=f"Question: {data['question']}".rstrip(),
            answers=[data["target"]],
            max_new_tokens=20,
            metric="babilong",
            all_classes=sorted(LABELS[name]),
        )


@metric("babilong")
def score(row: Row, reply: str) -> float:
    """Whether the right label is the only one in the reply's first sentence that the question does not name, 0 or 1."""
    first = reply.lower()
    for end in (".", "<context>", "<example>"):
        first = first.split(end)[0]
    assert row.all_classes is not None
    named = {label for label in row.all_classes if label in first and label not in row.question.lower()}
    return float(named == {row.answers[0].lower()})
