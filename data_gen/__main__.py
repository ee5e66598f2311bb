"""Write samples of a task to a file.

    python -m leank.data_gen --task niah_multivalue --length 4096 --count 100 --tokenizer reference --out samples.jsonl

--out FILE.jsonl writes one sample per line; any other name writes a `datasets.Dataset` folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from leank.cli import again, ending
from leank.data_gen.amount import amount
from leank.data_gen.chat import template_tokens
from leank.data_gen.haystack import SPLITS
from leank.data_gen.task import LONGEST, Request, Sample
from leank.data_gen.tasks import TASKS, task
from leank.data_gen.tokens import TokenCounter
from leank.extras import require
from leank.shipped import resolve

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


def rows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
    """Yield the samples of the task, one document after the other."""
    counter = TokenCounter(tokenizer)
    reserve = template_tokens(tokenizer) if args.chat else 0
    for index in range(args.start, args.start + args.count):
        request = Request(
            args.task, args.length, counter, args.seed, index, args.questions,
            exact=not args.ruler_fit, essays=args.essays, split=args.split, data=args.data, reserve=reserve,
        )  # fmt: skip
        yield from task(args.task).build(request).samples()


def write(samples: Iterator[Sample], out: Path) -> None:
    """Write samples to a JSONL file, or to a `datasets.Dataset` folder if `out` is no .jsonl: whole or not at all.

    Raises FileExistsError for a folder that holds something else.
    """
    lines = out.name.endswith(".jsonl")
    if out.is_dir() if lines else out.exists() and not (out / "dataset_info.json").is_file():
        kind = "a folder" if lines else "no datasets.Dataset folder"
        raise FileExistsError(f"out={str(out)!r} exists and is {kind}; choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = map(dataclasses.asdict, samples)
    with tempfile.TemporaryDirectory(prefix=".data_gen.", dir=out.parent) as folder:
        partial = Path(folder) / "partial"
        if lines:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
        else:
            require("--out FOLDER", "eval", "datasets")
            from datasets import Dataset

            Dataset.from_list(list(made)).save_to_disk(str(partial))
            shutil.rmtree(out, ignore_errors=True)
        os.replace(partial, out)


def main(argv: list[str] | None = None) -> None:
    """Run the command line of the module's docstring."""
    args = arguments(argv)
    with ending("data_gen", lambda: f"{args.out} is as it was; again: {again('leank.data_gen')}"):
        from transformers import AutoTokenizer  # seconds to import

        try:
            tokenizer = AutoTokenizer.from_pretrained(resolve(args.tokenizer))
        except OSError as error:
            raise FileNotFoundError(f"tokenizer={args.tokenizer!r}: {error}") from error
        write(rows(args, tokenizer), args.out)
    print(f"wrote {amount(args.count, 'document')} of {args.task} at {args.length} tokens to {args.out}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with one line for what cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m leank.data_gen", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=sorted(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--length", type=int, default=4096, help="tokens of prompt and answer (default 4096)")
    parser.add_argument("--count", type=int, default=100, help="documents (default 100)")
    parser.add_argument("--questions", type=int, default=1, help="questions per document (default 1)")
    parser.add_argument("--start", type=int, default=0, help="index of the first document (default 0)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tokenizer", default="reference", help="a shipped model, or any Hugging Face name or folder")
    parser.add_argument("--essays", help="text of essays, passkeys, text and quote: .txt(.gz), RULER .json or a folder")
    parser.add_argument("--split", default="all", choices=SPLITS, help="part of the text (default all)")
    parser.add_argument("--ruler-fit", action="store_true", help="whole units below length, as RULER sizes its samples")
    parser.add_argument("--data", help="file of the task's own data: SQuAD (qa_1), HotpotQA (qa_2), words (cwe)")
    parser.add_argument("--chat", action="store_true", help="leave room for the tokenizer's chat template")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    if not 1 <= args.count <= LONGEST or args.start < 0:
        cure = f"give a count from 1 to {LONGEST} and a start from 0 on"
        sys.exit(f"data_gen: count={args.count}, start={args.start}: {cure}")
    return args


if __name__ == "__main__":
    main()
