"""Natural text for reference models: packages become documents, and documents one stream of tokens."""

import shutil
import subprocess

import numpy as np
import pytest

from leank.data_gen import haystack
from scripts.reference_model.text import documents, html_text, main, read, tidy
from tests.helpers.text_tokenizers import tokenizer

PAGE = "<html><head><title>No</title></head><body><nav>menu</nav><h1>Chapter {i}</h1><p>{text}</p><pre>a  =  1</pre>"


def package(folder, pages: int):
    """The folder of an unpacked package of documentation."""
    pod = folder / "usr/share/perl/5/pod"
    html = folder / "usr/share/doc/sqlite3"
    pod.mkdir(parents=True)
    html.mkdir(parents=True)
    for i in range(pages):
        (html / f"{i:03d}.html").write_text(PAGE.format(i=i, text=f"Sentence number {i} of the page. " * 60))
    (html / "genindex.html").write_text(PAGE.format(i=0, text="index " * 600))
    (html / "short.html").write_text("<p>too short</p>")
    (pod / "perlfaq.pod").write_text("=head1 NAME\n\nAnswers to\tquestions.\n\n----\n")
    (pod / "perlgpl.pod").write_text("A licence, which nobody may change.\n")


def test_pages_become_prose():
    text = html_text(PAGE.format(i=3, text="Water &amp; wine.") + "<table><tr><td>1</td></tr></table>¶<p>42</p>")
    assert text == "Chapter 3\nWater & wine."
    assert tidy("  a  word \n\n 12 \n  ¶the  end") == "a word\nthe end"


def test_documents_come_in_a_fixed_order_and_without_licences(tmp_path):
    package(tmp_path / "sqlite3-doc", 2)
    package(tmp_path / "perl-doc", 0)
    found = list(documents(tmp_path))
    assert [text.split("\n")[0] for text in found] == ["Chapter 0", "Chapter 1", "too short", "=head1 NAME"]
    assert found[-1] == "=head1 NAME\nAnswers to questions."


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb unpacks the packages")
def test_packages_become_a_stream_of_tokens(tmp_path, capsys, monkeypatch):
    sentences = haystack.sentences
    monkeypatch.setattr(haystack, "sentences", lambda essays, split: sentences(essays, split)[:600])
    package(tmp_path / "sqlite3-doc", 40)
    control = tmp_path / "sqlite3-doc/DEBIAN/control"
    control.parent.mkdir()
    control.write_text("Package: sqlite3-doc\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: d\n")
    debs = tmp_path / "debs"
    debs.mkdir()
    build = ["dpkg-deb", "--build", str(tmp_path / "sqlite3-doc"), str(debs / "sqlite3-doc_1_all.deb")]
    subprocess.run(build, check=True, capture_output=True)
    main(["extract", str(debs), str(tmp_path / "text")])
    train, test = (read(tmp_path / "text", split) for split in ("train", "test"))
    pages = [[t for t in texts if t.startswith("Chapter")] for texts in (train, test)]
    assert [len(found) for found in pages] == [38, 2]
    assert [t.split("\n")[0] for t in pages[1]] == ["Chapter 19", "Chapter 39"]
    assert [len(train), len(test)] == [40, 4]  # the shipped paragraphs, 500 sentences a document
    assert not set(train) & set(test)
    tokenizer("reference").save_pretrained(tmp_path / "tokenizer")
    main(["tokens", str(tmp_path / "text"), str(tmp_path / "tokenizer")])
    stream = np.load(tmp_path / "text/test.npy")
    assert stream.dtype == np.uint16
    assert (stream == tokenizer("reference").eos_token_id).sum() == len(test)
    assert tokenizer("reference").decode(stream[: len(stream) // len(test) // 4]).startswith("Chapter 19\nSentence")
    assert "test:" in capsys.readouterr().out
    whole = np.load(tmp_path / "text/train.npy")
    main(["tokens", str(tmp_path / "text"), str(tmp_path / "tokenizer"), "--every", "2"])
    half, again = (np.load(tmp_path / f"text/{split}.npy") for split in ("train", "test"))
    eos = tokenizer("reference").eos_token_id
    documents_of = [np.split(ids, np.flatnonzero(ids == eos) + 1)[:-1] for ids in (whole, half)]
    assert [d.tolist() for d in documents_of[1]] == [d.tolist() for d in documents_of[0][::2]]
    assert np.array_equal(stream, again)
