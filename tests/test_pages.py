"""The pages name what there is: every key of both configurations, and no file or section that is not there.

What the README shows runs as it stands.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from leank.eval.report.plots import FIGURES
from tests import ROOT
from tests.helpers.pages import DOCS, PAGES

README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("conf", "data_gen", "eval", "leank_train", "scripts")
EXPLAINED_ELSEWHERE = ("benchmark", "method")  # have pages of their own


def keys(config, below=""):
    """Dotted names of the leaves; a mapping from names to values of one kind is a leaf."""
    for key, value in config.items():
        name = below + key
        if isinstance(value, dict) and value and name != "data.tasks":
            yield from keys(value, f"{name}.")
        else:
            yield name


@pytest.mark.parametrize("command", ["train", "eval"])
def test_configuration_explains_every_key(command):
    with initialize_config_module(f"conf.{command}", version_base="1.3"):
        config = OmegaConf.to_container(compose(command, return_hydra_config=False), resolve=False)
    text = (DOCS / "reference/configuration.md").read_text(encoding="utf-8")
    wanted = [key for key in keys(config) if not key.startswith(tuple(f"{g}." for g in EXPLAINED_ELSEWHERE))]
    assert len(wanted) > 10
    assert not [key for key in wanted if f"`{key}`" not in text]


@cache
def sections(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those written by hand."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


def is_there(target: Path, anchor: str) -> bool:
    """Whether the file exists, and has the section if one is named."""
    return target.exists() and (not anchor or anchor in sections(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_sections(page):
    links = {
        link.partition("#")
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link
    }
    wrong = [
        file + hash_ + anchor
        for file, hash_, anchor in links
        if not is_there(page.parent / file if file else page, anchor)
    ]
    assert not sorted(wrong)


def prose(page: Path) -> list[str]:
    """The lines of a page that are no code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.startswith("    ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_have_the_columns_of_their_table(page):
    wrong, columns = [], None
    for line in prose(page):
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        if cells and columns and cells != columns:
            wrong.append(line)
        columns = cells and (columns or cells)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_points_of_a_list_begin_lines(page):
    assert not [line for line in prose(page) if line[:1] != "|" and re.search(r"\w{2}\S* - \w", line)]


def test_dashboards_name_every_picture_of_an_evaluation():
    text = (DOCS / "train/dashboards.md").read_text(encoding="utf-8")
    assert not [name for name in FIGURES if f"`plots/{name}`" not in text]


def test_every_picture_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not {file.name for kind in ("png", "svg") for file in DOCS.rglob(f"*.{kind}") if f"{file.name})" not in text}


@pytest.mark.parametrize("package", PACKAGES)
def test_pages_named_in_the_code_are_there(package):
    wrong = {}
    for file in (ROOT / package).rglob("*"):
        if file.suffix in (".py", ".yaml", ".md"):
            named = re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8"))
            wrong |= {page: file for page, anchor in named if not is_there(ROOT / page, anchor)}
    assert not wrong


@pytest.mark.parametrize(
    "page",
    [*(page for page in DOCS.rglob("*.md") if "lab" not in page.parts), ROOT / "CONTRIBUTING.md", ROOT / "README.md"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_paths_are_of_the_tree(page):
    """Files that readers write themselves (extend/index.md) and those of a named commit are not there."""
    text = "" if page == DOCS / "extend/index.md" else page.read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:conf|data_gen|docs|eval|leank|leank_train|scripts|tests)/[\w/.]+)`(?! of [0-9a-f]{8})", text
    )
    assert not sorted(path for path in set(named) if "NAME" not in path and not (ROOT / path).exists())


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    page = (DOCS / "use/troubleshooting.md").read_text("utf-8").partition("## Doubts")[2].partition("## Out of")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = [file for package in ("eval", "leank", "leank_train") for file in (ROOT / package).rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(file.read_text("utf-8") for file in files))  # one text over two lines
    assert len(messages) > 10
    assert not [message for message in messages if message not in code]


def test_the_example_of_a_mask_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it needs no checkout
    ((code, shown),) = re.findall(r"```python\n([^`]*)```\n```text\n([^`]*)```", README)
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_the_families_are_those_of_their_page():
    said = re.search(r"Of \d+ causal .*? trained too", (DOCS / "use/families.md").read_text("utf-8"))[0]
    assert said in " ".join(README.split())
    everywhere, run, trained = re.findall(r"(?<= )\d+(?= )", said)
    page = " ".join((DOCS / "train/own_model.md").read_text("utf-8").split())
    assert f"Of {everywhere} causal decoders of transformers, [{run} run and {trained} can be trained]" in page
