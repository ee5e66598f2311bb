"""Natural text for the reference model: English prose of free Debian packages, as token streams.

    apt-get download bible-kjv bible-kjv-text postgresql-doc-15 python3.11-doc debian-handbook python-django-doc \
        sqlite3-doc apache2-doc libreoffice-help-en-us rust-doc perl-doc llvm-15-doc cmake-doc nodejs-doc \
        erlang-doc python-sqlalchemy-doc ghc-doc sphinx-doc
    python -m scripts.reference_model.text extract FOLDER_OF_DEBS TEXT
    python -m scripts.reference_model.text tokens TEXT TOKENIZER [--every 2]

`extract` writes TEXT/train.txt.gz and TEXT/test.txt.gz, one document a line (line ends as form feeds); every twentieth
document is kept for the test. `tokens` writes TEXT/train.npy and TEXT/test.npy (uint16, an EOS behind each document).
`--every 2` leaves every other document out of train.npy. Neither the text nor the tokens are part of the repository;
the card of the second reference model has the licences of the packages.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from leank.data_gen import haystack
from leank.data_gen.amount import amount

# package -> the files that hold prose
SOURCES = {
    "postgresql-doc-15": ("usr/share/doc/postgresql-doc-15/html/*.html",),
    "python3.11-doc": ("usr/share/doc/python3.11/html/**/*.html",),
    "debian-handbook": ("usr/share/doc/debian-handbook/html/en-US/*.html",),
    "python-django-doc": ("usr/share/doc/python-django-doc/html/**/*.html",),
    "sqlite3-doc": ("usr/share/doc/sqlite3/*.html", "usr/share/doc/sqlite3/session/*.html"),
    "apache2-doc": ("usr/share/doc/apache2-doc/manual/en/**/*.html",),
    "libreoffice-help-en-us": ("usr/share/libreoffice/help/en-US/text/**/*.html",),
    "rust-doc": tuple(
        f"usr/share/doc/rust-doc/html/{part}/*.html" for part in ("book", "reference", "nomicon", "rustc", "cargo")
    ),
    "perl-doc": ("usr/share/perl/**/*.pod",),
    "llvm-15-doc": tuple(
        f"usr/share/doc/llvm-15-doc/html/{part}*.html" for part in ("", "CommandGuide/", "tutorial/**/")
    ),
    "cmake-doc": ("usr/share/doc/cmake-data/html/**/*.html",),
    "nodejs-doc": ("usr/share/doc/nodejs/api/*.html",),
    "erlang-doc": ("usr/share/doc/erlang-doc/**/doc/html/*.html",),
    "python-sqlalchemy-doc": ("usr/share/doc/python-sqlalchemy-doc/html/**/*.html",),
    "ghc-doc": ("usr/share/doc/ghc-doc/html/users_guide/**/*.html",),
    "sphinx-doc": ("usr/share/doc/sphinx-doc/html/**/*.html",),
}
# listings and indices, and licences, which nobody may change
_NO_PROSE = (
    "/_modules/", "/wx-", "/genindex", "/py-modindex", "/search.html", "/AMDGPU/", "/perlgpl.pod", "/perlartistic.pod",
)  # fmt: skip
SPLITS = ("train", "test")
_TEST_SHARE = 20
_SHORTEST = 1500  # characters of a document that is worth keeping
_SKIPPED = {"script", "style", "nav", "header", "footer", "head", "svg", "table"}
_BLOCKS = {"p", "div", "li", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "br", "section", "ul", "ol", "dl"}


class _Prose(HTMLParser):
    """Collects the text of a page; blocks end in a line end, menus, tables and scripts are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count what is skipped, end lines at blocks."""
        if tag in _SKIPPED:
            self.skipped += 1
        elif tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        """Count what is skipped, end lines at blocks."""
        if tag in _SKIPPED:
            self.skipped = max(0, self.skipped - 1)
        elif tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        """Keep text that is not skipped."""
        if not self.skipped:
            self.pieces.append(data)


def html_text(page: str) -> str:
    """Return the prose of an HTML page."""
    parser = _Prose()
    parser.feed(page)
    return tidy("".join(parser.pieces))


def tidy(text: str) -> str:
    """Return the text with single blanks and no empty lines, without lines that hold no letters."""
    lines = (" ".join(line.split()) for line in text.replace("¶", "").splitlines())
    return "\n".join(line for line in lines if re.search("[A-Za-z]{2}", line))


def documents(unpacked: Path) -> Iterator[str]:
    """Yield the documents of all packages that lie in folders of their names, in a fixed order."""
    if (unpacked / "bible-kjv-text").is_dir():
        yield from _bible(unpacked)
    for package, globs in SOURCES.items():
        files = {f.resolve() for g in globs for f in (unpacked / package).glob(g)}
        for file in sorted(f for f in files if f.is_file() and not any(part in str(f) for part in _NO_PROSE)):
            text = file.read_text(encoding="utf-8", errors="ignore")
            yield html_text(text) if file.suffix == ".html" else tidy(text)


def _bible(unpacked: Path) -> list[str]:
    """Return the books of the King James Version."""
    reader = unpacked / "bible-kjv/usr/bin/bible"
    command = [str(reader.resolve()), "-p", ".", "-l10000", "Gen1:1-Rev22:21"]
    folder = unpacked / "bible-kjv-text/usr/lib"
    text = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    books = re.split(r"\n(?=\w[\w ]* 1\n\n)", text)  # a book begins with its name and chapter 1
    return [tidy(re.sub(r"\n\s+\d+ ", "\n", book)) for book in books]


def extract(debs: Path, out: Path) -> None:
    """Write the documents of a folder of .deb files, and the shipped paragraphs, split into train and test."""
    with tempfile.TemporaryDirectory() as temporary:
        for deb in sorted(debs.glob("*.deb")):
            target = Path(temporary) / deb.name.split("_")[0]
            subprocess.run(["dpkg-deb", "-x", str(deb), str(target)], check=True)
        found = list(dict.fromkeys(d for d in documents(Path(temporary)) if len(d) >= _SHORTEST))
    parts = {
        "train": [d for i, d in enumerate(found, 1) if i % _TEST_SHARE],
        "test": found[_TEST_SHARE - 1 :: _TEST_SHARE],
    }
    for split, texts in parts.items():
        sentences = haystack.sentences(None, split)
        texts += [" ".join(sentences[i : i + 500]) for i in range(0, len(sentences), 500)]
        with gzip.open(out / f"{split}.txt.gz", "wt", encoding="utf-8") as file:
            file.writelines(text.replace("\n", "\f") + "\n" for text in texts)
        print(f"{split}: {amount(len(texts), 'document')}, {sum(map(len, texts)) / 1e6:.1f} M characters")


def read(folder: Path, split: str) -> list[str]:
    """Return the documents of a split that `extract` wrote."""
    with gzip.open(folder / f"{split}.txt.gz", "rt", encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n").replace("\f", "\n") for line in file]


def tokenise(folder: Path, tokenizer_folder: Path, every: int = 1) -> None:
    """Write the documents as one stream of token ids per split; of those to train on, each `every`-th alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for split in SPLITS:
        texts = read(folder, split)[:: every if split == "train" else 1]
        pieces = []
        for i in range(0, len(texts), 32):  # the encodings of all texts at once would take gigabytes
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts[i : i + 32], add_special_tokens=False)
            pieces += [np.array([*e.ids, tokenizer.eos_token_id], dtype=np.uint16) for e in encoded]
        ids = np.concatenate(pieces)
        np.save(folder / f"{split}.npy", ids)
        size = sum(len(t.encode()) for t in texts)
        print(f"{split}: {len(ids) / 1e6:.2f} M tokens, {size / len(ids):.2f} bytes per token")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["extract", "tokens"])
    parser.add_argument("source", type=Path, help="extract: the folder of .deb files; tokens: the folder of the text")
    parser.add_argument("target", type=Path, help="extract: the folder to write; tokens: the tokenizer's folder")
    parser.add_argument("--every", type=int, default=1, help="tokens: take each n-th document of training (default 1)")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every={args.every} must be at least 1")
    if args.action == "extract":
        args.target.mkdir(parents=True, exist_ok=True)
        extract(args.source, args.target)
    else:
        tokenise(args.source, args.target, args.every)


if __name__ == "__main__":
    main()
