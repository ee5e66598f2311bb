"""HELMET's recall, RAG and ICL: a value of a long JSON object, questions on many passages, labels shown by examples.

Source: princeton-nlp/HELMET 4526dfb, data.py and utils.py (MIT; prompts unchanged in assets/). Data: folders json_kv
and kilt of its data.tar.gz, and for ICL icl/TASK_train.jsonl and icl/TASK_test.jsonl, lines with "text" and a number
"label".
"""

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired

import numpy as np
from annotated_types import Ge, Gt, MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank, digest
from leank.eval.benchmarks.base import Row, benchmark, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, asset, checked, read
from leank.eval.metrics.text import normalize
from leank.typed import OneOf

OFFICIAL: dict[str, Any] = asset("helmet")  # the prompts, and how many passages, pairs or examples each length has
RAG: dict[str, str] = OFFICIAL["rag"]["files"]  # of each task, without the split and the number of passages
ICL: dict[str, int] = OFFICIAL["icl"]["labels"]  # how many labels each task has
LENGTHS = tuple(OFFICIAL["json_kv"]["pairs"])
TASKS = ("json_kv", *RAG, *ICL)
SHOTS = 2  # examples of recall and RAG
POPULAR = 3  # popqa asks for what has fewer than 10 ** 3 views
SEED = 42
PREFIX = {**dict.fromkeys(ICL, "label:"), **dict.fromkeys(RAG, "Answer:"), "json_kv": "Corresponding value:"}


class Passage(TypedDict):
    """A passage, and the title of its article."""

    title: str
    text: str


class RagLine(TypedDict):
    """A question with its passages."""

    question: NotBlank
    answers: Annotated[list[NotBlank], MinLen(1)]
    ctxs: list[Passage]
    id: NotRequired[str | int | None]
    s_pop: NotRequired[Annotated[float, Gt(0)] | Annotated[int, Gt(0)] | None]


class KvLine(TypedDict):
    """A JSON object, and the key that is asked for."""

    context: NotBlank
    question: NotBlank
    answer: NotBlank
    demos: Annotated[list[Annotated[list[str], MinLen(2)]], MinLen(SHOTS)]


class IclLine(TypedDict):
    """A text and the number of its label."""

    text: NotBlank
    label: Annotated[int, Ge(0)]


SCHEMAS: dict[str, TypeAdapter[Any]] = {"json_kv": TypeAdapter(KvLine), **dict.fromkeys(RAG, TypeAdapter(RagLine)),
           **dict.fromkeys(ICL, TypeAdapter(IclLine))}  # fmt: skip


@benchmark("helmet")
@dataclass
class Helmet(FromFiles):
    """HELMET; its cells are named nq_8k and so on; path: the folder that holds json_kv/, kilt/ and icl/."""

    tasks: Tasks = TASKS  # json_kv; nq, triviaqa, hotpotqa, popqa; trec_coarse, trec_fine, banking77, clinic150, nlu
    # 8k to 128k, about so many tokens
    lengths: Annotated[Sequence[Annotated[str, OneOf(*LENGTHS)]], MinLen(1)] = ("8k", "16k", "32k")
    # "completion", which ends with the start of the answer, or "chat", through the chat template
    style: Annotated[str, OneOf("completion", "chat")] = "completion"
    name: str = "helmet"
    _examples: dict[str, list[Any]] = field(default_factory=dict, repr=False)

    schema = TypeAdapter(dict[str, Any])  # `lines` checks each task's own
    counted = ("style",)

    def wanted(self) -> Sequence[str]:
        known_tasks(self.tasks, TASKS, "is no task of HELMET that is here")
        return [f"{task}_{length}" for length in self.lengths for task in self.tasks]

    def lines(self, task: str) -> Iterator[Line]:
        """Yield the lines of a task at a length, and keep its examples. Raises FileNotFoundError without a folder."""
        name, _, length = task.rpartition("_")
        if name == "json_kv":
            return self._read(name, f"json_kv/test_k{OFFICIAL['json_kv']['pairs'][length]}_dep6")
        if name in ICL:
            self._examples[task] = [line.data for line in self._read(name, f"icl/{name}_train")]
            return self._read(name, f"icl/{name}_test")
        self._examples[task] = [line.data for line in self._read(name, f"kilt/{RAG[name].format('train', 3)}")]
        return self._read(name, f"kilt/{RAG[name].format('dev', OFFICIAL['rag']['passages'][length])}")

    def _read(self, task: str, file: str) -> Iterator[Line]:
        if self.path is None:
            raise FileNotFoundError("benchmark.path=null: give the folder of HELMET's unpacked data.tar.gz (README)")
        lines = checked(read(f"HELMET {task}", file, self.path, Hub("", f"{file}.jsonl")), SCHEMAS[task])
        return lines if task != "popqa" else (x for x in lines if math.log10(x.data.get("s_pop") or 1) < POPULAR)

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        return digest(repr(self._examples.get(task)) + super()._known_by(task, lines))

    def build(self, task: str, data: Any) -> Row:
        name = task.rpartition("_")[0]
        if name == "json_kv":
            shown = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in data["demos"][:SHOTS])
            question = f"{OFFICIAL['json_kv']['prompt']}{shown}Key: {data['question']}"
            context, answers = data["context"], [data["answer"]]
        elif name in ICL:
            names, examples = self._labelled(task, data)
            context = OFFICIAL["icl"]["prompt"] + "\n\n".join(
                f"{one['text']}\nlabel: {names[one['label']]}" for one in examples
            )
            question, answers = f"\n\n{data['text']}", [str(names[data["label"]])]
        else:
            context = OFFICIAL["rag"]["prompt"] + self._shown(task, data) + passages(data)
            question, answers = f"\n\nQuestion: {data['question']}", data["answers"]
        chat = self.style == "chat"
        return Row(
            task=task,
            id="",
            context=context,
            question=question if chat else f"{question}\n{PREFIX[name]}",
            answers=answers,
            max_new_tokens=100 if name == "json_kv" else 20,
            metric="helmet_label" if name in ICL else "helmet_answer",
            chat=chat,
            preamble=({"role": "system", "content": OFFICIAL["system"]},) if chat else (),
        )

    def _shown(self, task: str, data: Mapping[str, Any]) -> str:
        """The examples of RAG, which `datasets` shuffles by a seed of the question's own."""
        key = "id" if "id" in data else "question"
        examples = [one for one in self._examples[task] if not task.startswith("popqa") or one[key] != data[key]]
        order = np.random.default_rng(seed_of(str(data[key]))).permutation(len(examples))
        distinct: dict[str | int, Any] = {}
        for at in order:
            distinct.setdefault(examples[at][key], examples[at])
        if len(distinct) < SHOTS:
            raise ValueError(f"there are {len(distinct)} examples for {task}, and {SHOTS} are shown")
        return "".join(
            f"{passages(one)}\n\nQuestion: {one['question']}\nAnswer: {one['answers'][0]}\n\n"
            for one in list(distinct.values())[:SHOTS]
        )

    def _labelled(self, task: str, data: IclLine) -> tuple[list[int], list[IclLine]]:
        """The number that stands for each label, and examples in rounds of every label, by a seed of the text."""
        name, _, length = task.rpartition("_")
        kinds, shots = ICL[name], OFFICIAL["icl"]["examples"][name][length]
        seed = (seed_of(data["text"], None) + SEED) % 2**31
        by_label: dict[int, list[IclLine]] = {}
        for one in self._examples[task]:
            by_label.setdefault(one["label"], []).append(one)
        if max(*by_label, data["label"]) >= kinds:
            raise ValueError(f"label={max(*by_label, data['label'])} is none of the {kinds} of {name}")
        draw, rounds = random.Random(seed), math.ceil(shots / len(by_label))
        chosen: list[list[IclLine]] = [[] for _ in range(rounds)]
        for examples in by_label.values():
            at = draw.sample(range(len(examples)), rounds % len(examples))
            while len(at) < rounds:
                at += draw.sample(range(len(examples)), min(rounds - len(at), len(examples)))
            for one, index in zip(chosen, at, strict=True):
                one.append(examples[index])
        for one in chosen:
            draw.shuffle(one)
        names = list(range(kinds))
        random.Random(seed).shuffle(names)
        return names, [example for one in chosen for example in one][:shots]


def seed_of(text: str, limit: int | None = 2**31) -> int:
    """The number that SHA-256 makes of a text, modulo `limit`."""
    number = int(hashlib.sha256(text.encode()).hexdigest(), 16)
    return number if limit is None else number % limit


def passages(data: Mapping[str, Any]) -> str:
    """The passages of a question, each with its title."""
    return "\n\n".join(f"Document (Title: {one['title']}): {one['text']}" for one in data["ctxs"])


def stated(reply: str, prefix: str) -> str:
    """What follows the prefix on its line, whatever its case; else the first line."""
    found = re.search(f"{prefix}(.*)(?:\n|$)", reply, re.IGNORECASE) or re.search("^(.*)(?:\n|$)", reply)
    line = found[1].strip() if found else ""
    return re.sub(f"^{prefix}", "", line, flags=re.IGNORECASE).strip()


@metric("helmet_answer")
def answer(row: Row, reply: str) -> float:
    """Whether an answer is part of the reply, or of what it states, once both are normalised as in SQuAD; 0 or 1."""
    texts = [normalize(text) for text in (reply, stated(reply, PREFIX[row.task.rpartition("_")[0]]))]
    return float(any(normalize(one) in text for one in row.answers for text in texts))


@metric("helmet_label")
def label(row: Row, reply: str) -> float:
    """Whether the label that the reply states is right, both normalised as in SQuAD; 0 or 1."""
    return float(normalize(stated(reply, PREFIX[row.task.rpartition("_")[0]])) == normalize(row.answers[0]))
