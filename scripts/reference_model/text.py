"""Natural text for the reference models, as token streams.

    python -m scripts.reference_model.text TEXT TOKENIZER [--every 2]

TEXT is a folder of .txt files, one document each; the shipped paragraphs join them. Every twentieth document is kept
for the test. TEXT/train.npy and TEXT/test.npy (uint16, an EOS behind each document) are written. `--every 2` leaves
every other document out of train.npy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from leank.data_gen import haystack

_TEST_SHARE = 20
_SENTENCES = 500  # of the shipped paragraphs in a document


def documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, "train" or "test", in a fixed order."""
    files = sorted(folder.rglob("*.txt"))
    mine = [file for i, file in enumerate(files, 1) if (i % _TEST_SHARE == 0) == (split == "test")]
    shipped = haystack.sentences(None, split)
    return [file.read_text(encoding="utf-8", errors="ignore") for file in mine] + [
        " ".join(shipped[i : i + _SENTENCES]) for i in range(0, len(shipped), _SENTENCES)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER")
    parser.add_argument("--every", type=int, default=1, help="take each n-th document of training (default 1)")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for split in ("train", "test"):
        texts, pieces = documents(args.text, split)[:: args.every if split == "train" else 1], []
        for i in range(0, len(texts), 32):  # the encodings of all texts at once would take gigabytes
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts[i : i + 32], add_special_tokens=False)
            pieces += [np.array([*e.ids, tokenizer.eos_token_id], dtype=np.uint16) for e in encoded]
        ids = np.concatenate(pieces)
        np.save(args.text / f"{split}.npy", ids)
        size = sum(len(text.encode()) for text in texts)
        print(f"{split}: {len(ids) / 1e6:.2f} M tokens, {size / len(ids):.2f} bytes per token")


if __name__ == "__main__":
    main()
