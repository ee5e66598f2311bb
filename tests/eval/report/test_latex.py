"""tables.tex compiles whatever the names are; it holds the cells of the report's tables."""

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.report.latex import document, escape, latex
from leank.eval.report.table import ReportTable, TableLine

NASTY = ["[1] a", "* b", "a_b & c", "50% #1 $x$", "{y} \\end{tabular}", "~^<>|\"'`", "λ=0.06 – é 日本 \x07", ""]


@settings(max_examples=50)
@given(st.text())
def test_what_is_special_to_latex_never_stands_bare(text):
    out = escape(text)
    assert out.isascii()
    known = re.sub(r"\\text[a-z]+\{\}|\$\\[a-z]+\$|\$-\$|\\[&%$#_{}]|\{[\[\]*?]\}", "", out)
    assert not set(known) & set("\\&%$#_{}~^<>|[]*")


@settings(max_examples=30)
@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"])))
def test_letters_and_digits_stay(text):
    assert escape(text) == text


def test_the_papers_figures_stand_apart():
    table = ReportTable(
        "T", ["method", "a"], [TableLine(["ours", "1.0"]), TableLine(["theirs", "2.0"], published=True)], "Note."
    )
    text = latex(table, "about it")
    assert text.index(r"ours & 1.0 \\") < text.rindex(r"\midrule") < text.index(r"\textit{theirs} & \textit{2.0} \\")
    assert r"\caption{T. about it. Note.}" in text
    assert "resizebox" not in text
    assert "resizebox" in latex(ReportTable("T", [str(i) for i in range(9)], []))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="apt install texlive-latex-recommended to compile the tables"
)
def test_nasty_names_compile(tmp_path):
    tables = [
        (name, ReportTable(name or "T", [*NASTY], [TableLine(NASTY), TableLine(NASTY[::-1], published=True)], name))
        for name in NASTY
    ]
    (tmp_path / "tables.tex").write_text(document(tables))
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}\\input{tables}\\end{document}"
    )
    line = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:]
