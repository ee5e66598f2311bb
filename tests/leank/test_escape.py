"""What stands in a label, a task name or a reply stays text in every file that we write."""

import csv
import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from leank.escape import csv_cell, csv_text, markdown, markdown_table

NASTY = st.text(st.sampled_from("=+-@\t\r\n;,'\"|\\`*_~$<>[]()!&#:/.w1e ａ＝")) | st.text()
LEADING = r"(\A|[;\t\r\n])'+"  # apostrophes where a spreadsheet may begin a cell
FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t1", "\r1", " =1", '"=1', "＝1+1", "-", "=cmd|' /C calc'!A0"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text(text):
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", [1, -1, -0.5, 1e-9, None, True, "-1.5", "+2", "1e-7", "a = b", "a-b", "[-1]"])
def test_numbers_and_plain_texts_stay(value):
    assert csv_cell(value) is value


@given(st.lists(st.lists(NASTY | st.floats(allow_nan=False) | st.integers(), min_size=2, max_size=4), max_size=4))
@example([["x;=1+1", 'y\n"=1']])
@example([["", "'="]])
def test_a_csv_read_back_is_the_text_with_apostrophes_where_they_are_needed(lines):
    found = list(csv.reader(io.StringIO(csv_text(lines), newline="")))
    assert found == [[str(csv_cell(value)) for value in line] for line in lines]
    for line, cells in zip(lines, found, strict=True):
        for value, cell in zip(line, cells, strict=True):
            if isinstance(value, str):
                assert re.sub(LEADING, r"\1", cell) == re.sub(LEADING, r"\1", value)
                assert len(cell) >= len(value)
                for part in re.split(r"[;\t\r\n]", cell):  # the cells of a spreadsheet with other separators
                    start = part.strip().lstrip("\"' ")[:1]
                    harmless = part.strip().lstrip('" ').startswith("'") or re.fullmatch(r"[+-]?[\d.eE+-]+", cell)
                    assert start not in tuple("=+-@＝＋－＠") or harmless
            else:
                assert float(cell) == float(value)


def rendered(text):
    return MarkdownIt("gfm-like", {"linkify": False}).render(text)


@given(st.lists(NASTY, min_size=1, max_size=3), NASTY)
@example(["a|b", "c\\|d"], "\\")
@example(["`a", "b`"], "|")
def test_a_table_has_its_columns_and_no_markup_whatever_the_texts(texts, other):
    head = [*texts, "end"]
    page = rendered(markdown_table(head, [head, [other] * len(head)]))
    assert page.count("<tr>") == 3
    assert page.count("<th") - page.count("<thead") == len(head)
    assert page.count("<td") == 2 * len(head)
    tags = set(re.findall(r"</?(\w+)", page))
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td"}


@given(NASTY)
@example("[a](http://b)")
@example("![a](b)")
@example("&lt;")
def test_markdown_shows_the_text(text):
    page = rendered(f"x{markdown(text)}x")
    assert re.findall(r"<(?!/?p>)", page) == []
    shown = page.removeprefix("<p>x").removesuffix("x</p>\n")
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        shown = shown.replace(entity, char)
    assert shown == "".join(c if c.isprintable() else " " for c in text)


def test_usual_names_stay_readable():
    assert markdown("niah_single_1") == "niah_single_1"
    assert markdown("97.5 [96.0, 99.0]") == "97.5 [96.0, 99.0]"
    assert markdown("think (ratio=0.6)") == "think (ratio=0.6)"
    assert markdown("www.a.b http://a.b") == r"www\.a.b http\://a.b"
