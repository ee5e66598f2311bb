"""LongBench v1: prompts, truncation and rows.

Source: THUDM/LongBench 2e00731, pred.py and config/ (MIT; prompts unchanged in assets/, typo "asconcisely" included).
Data: <task>.jsonl files (or .jsonl.gz) in a folder, else the benchmark's data.zip from the Hugging Face hub.
"""

import gzip
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from eval.benchmarks.row import Row

HUB_REPO = "zai-org/LongBench"  # THUDM/LongBench until it moved; a loading script there, so read its zip ourselves

# Chat models do better without their template on few-shot and code tasks (official choice).
NO_CHAT_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
ENGLISH_TASKS = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
# LongBench-E draws 13 of them anew, evenly over context lengths.
E_TASKS = tuple(task for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique", "qmsum"))
PRESETS: dict[str, tuple[str, ...]] = {
    "english": ENGLISH_TASKS,
    "think": ENGLISH_TASKS,
    "iap": ENGLISH_TASKS,
    "leank": tuple(task for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique")),
    "longbench_e": tuple(f"{task}_e" for task in E_TASKS),
}


class Tokenizer(Protocol):
    """What truncation needs; any Hugging Face tokenizer has it."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model's prompts carry."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids."""
        ...


@cache
def prompts() -> dict[str, str]:
    """Official prompt of each task, with {context} and most also {input}."""
    return _asset("longbench_dataset2prompt.json")


@cache
def max_new_tokens() -> dict[str, int]:
    """Official reply length of each task, tokens."""
    return _asset("longbench_dataset2maxlen.json")


def tasks(preset: str) -> tuple[str, ...]:
    """Task names of a preset. Raises ValueError for an unknown one."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[preset]


def truncate_middle(text: str, max_length: int, tokenizer: Tokenizer) -> str:
    """`text` if it has at most `max_length` tokens, else its first and last max_length // 2 tokens, decoded.

    Both halves are decoded on their own without special tokens, so re-encoding may differ by a token at the seam.
    """
    if max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no prompt; use the model's context less the reply")
    ids = tokenizer.encode(text)
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


def build_row(
    task: str,
    data: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    max_length: int | None = None,
) -> Row:
    """One line of the data set as a `Row`; ``row.prompt`` is the official prompt.

    task: official name; "_e" (LongBench-E) uses the same prompt. data: "context", "input", "answers", and "length",
    "all_classes", "_id" where they exist. max_length: truncate the prompt to so many tokens, before the chat template
    as officially; None leaves it whole. Where truncation cuts into the question, all of the prompt is context.
    """
    name = task.removesuffix("_e")
    if name not in prompts():
        raise ValueError(f"task={task!r} is not in LongBench; choose one of {', '.join(prompts())}")
    template = prompts()[name]
    before, after = template.split("{context}")
    prompt = template.format(context=data["context"], input=data["input"])
    question = after.format(input=data["input"])
    if max_length is not None:
        if tokenizer is None:
            raise ValueError(f"max_length={max_length} needs the model's tokenizer; pass tokenizer= or max_length=None")
        prompt = truncate_middle(prompt, max_length, tokenizer)
    if not prompt.endswith(question) or len(prompt) < len(question) + len(before):
        question = ""
    return Row(
        task=task,
        id=str(data.get("_id", "")),
        context=prompt[: len(prompt) - len(question)],
        question=question,
        answers=list(data["answers"]),
        max_new_tokens=max_new_tokens()[name],
        metric="longbench",
        # samsum: the official run also stops at a newline and forbids ending before the first token
        stop=("\n",) if name == "samsum" else (),
        min_new_tokens=1 if name == "samsum" else 0,
        chat=name not in NO_CHAT_TASKS,
        all_classes=data.get("all_classes"),
        length=data.get("length"),
    )


def rows(
    task: str,
    path: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    max_length: int | None = None,
    limit: int | None = None,
) -> Iterator[Row]:
    """Rows of a task in file order, at most `limit`. path: see `read`; tokenizer, max_length: see `build_row`."""
    for count, data in enumerate(read(task, path)):
        if limit is not None and count >= limit:
            return
        yield build_row(task, data, tokenizer, max_length)


def read(task: str, path: str | Path | None = None) -> Iterator[dict[str, Any]]:
    """The data set's own lines. path: a .jsonl or .jsonl.gz file, a data.zip, or a folder; None asks the hub.

    Raises FileNotFoundError, saying which file to put where, if there is neither.
    """
    source = Path(path) if path is not None else _from_hub(task)
    if source.is_dir():
        names = [f"{task}.jsonl", f"{task}.jsonl.gz", "data.zip"]
        found = next((source / name for name in names if (source / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"LongBench {task}: none of {', '.join(names)} in {source}; put one there")
        source = found
    if not source.is_file():
        raise FileNotFoundError(f"LongBench {task}: {source} does not exist; give a .jsonl file, data.zip or a folder")
    if source.suffix == ".zip":
        with zipfile.ZipFile(source) as archive:
            member = next((name for name in archive.namelist() if Path(name).name == f"{task}.jsonl"), None)
            if member is None:
                raise FileNotFoundError(f"LongBench {task}: no {task}.jsonl in {source}; is it LongBench's data.zip?")
            with io.TextIOWrapper(archive.open(member), encoding="utf-8") as lines:
                yield from _parse(lines)
    else:
        opener = gzip.open if source.suffix == ".gz" else open
        with opener(source, "rt", encoding="utf-8") as lines:
            yield from _parse(lines)


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield json.loads(line)


def _from_hub(task: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(HUB_REPO, "data.zip", repo_type="dataset"))
    except Exception as error:  # offline, blocked, moved or not installed: the way out is the same
        raise FileNotFoundError(
            f"LongBench {task}: no path= given and {HUB_REPO}/data.zip cannot be fetched from the hub ({error}). "
            f"Download https://huggingface.co/datasets/{HUB_REPO}/resolve/main/data.zip and pass path=<its folder>"
        ) from error


def _asset(name: str) -> Any:
    return json.loads(files("eval.benchmarks").joinpath("assets", name).read_text(encoding="utf-8"))
