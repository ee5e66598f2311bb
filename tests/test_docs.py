"""The pages name what there is: every key of both configurations, and no file that is not there."""

import re

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from tests import ROOT

DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
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
    config.pop("mask" if command == "train" else "", None)  # the old name of `pruning`
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    wanted = [key for key in keys(config) if not key.startswith(tuple(f"{g}." for g in EXPLAINED_ELSEWHERE))]
    assert len(wanted) > 10
    assert not [key for key in wanted if f"`{key}`" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not sorted(link for link in links if link and not (page.parent / link).exists())


@pytest.mark.parametrize("page", ["architecture.md", "../CONTRIBUTING.md", "configuration.md"])
def test_paths_are_of_the_tree(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:conf|data_gen|docs|eval|leank_train|scripts|tests)/[\w/.]+)`", text)
    assert named
    assert not sorted(path for path in set(named) if "NAME" not in path and not (ROOT / path).exists())
