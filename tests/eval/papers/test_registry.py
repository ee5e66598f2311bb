"""The registry holds every figure and table of the papers, and all that its items name is there."""

import re
from dataclasses import replace
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from transformers import MistralConfig

from leank.eval import published
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import build_method
from leank.eval.methods.channels.iap import IAP
from leank.eval.methods.memory import method_bytes
from leank.eval.papers.item import Analysed, Command, Contrast, EvalRun, Expect, Item, Need
from leank.eval.papers.make import Made, Options
from leank.eval.papers.page import commands, of_item
from leank.eval.papers.registry import ITEMS, PAPERS, find, of_papers, runs, status
from leank.eval.run.build import expanded
from leank.typed import STRICT
from scripts.analyses import ANALYSES
from tests import ROOT

NUMBERS = {"leank": (10, 23), "think": (7, 12), "iap": (4, 8), "lethe": (6, 6), "asl": (10, 12)}
STEPS = [(item, step) for item in ITEMS.values() for step in (*item.here, *item.real)]


def run_of(step):
    """The overrides of a step in its quick form, which has those of the whole form first."""
    return (*step.overrides, *step.quick) if isinstance(step, EvalRun) else ("+experiment=papers/here", *step.overrides)


@pytest.fixture(scope="module")
def composed():
    """The configuration of every run of the registry, by its overrides; resolved, and without weights."""
    found = {}
    with initialize_config_module("leank.conf.eval", version_base="1.3"):
        for _, step in STEPS:
            if isinstance(step, Command):
                continue
            overrides = run_of(step)
            if overrides not in found:
                found[overrides] = OmegaConf.to_container(compose("eval", list(overrides)), resolve=True)
    return found


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_number_is_there_once(paper):
    figures, tables = NUMBERS[paper]
    wanted = [*(f"figure {n + 1}" for n in range(figures)), *(f"table {n + 1}" for n in range(tables))]
    items = of_papers([paper])
    assert [item.number for item in items] == wanted
    assert len({item.id for item in items}) == len(items)
    assert paper in PAPERS


def test_every_run_composes_and_its_methods_are_checked(composed):
    for config in composed.values():
        labels = expanded(config["method"])
        assert {build_method(label, given, config["cache"]).label for label, given in labels.items()} == {*labels}


def test_claims_compare_methods_that_the_item_runs(composed):
    for item in ITEMS.values():
        for claim in item.claims:
            if isinstance(claim, Contrast):
                runs = [composed[run_of(step)] for step in item.here if isinstance(step, EvalRun)]
                assert any({claim.first, claim.second} <= {*expanded(run["method"])} for run in runs), item.id
            else:
                assert isinstance(claim, Expect)
                assert any(isinstance(step, Analysed) for step in item.here), item.id


def test_settings_of_analyses_are_theirs():
    for _, step in STEPS:
        if isinstance(step, Analysed):
            hints = get_type_hints(ANALYSES[step.name].measure, include_extras=True)
            for name, value in {**step.settings, **step.quick}.items():
                TypeAdapter(hints[name], config=STRICT).validate_python(list(value) if name == "lengths" else value)


def test_published_tables_are_there():
    for item in ITEMS.values():
        assert {*item.tables} <= {*published.tables(item.paper)}, item.id


def plain(name):
    """A model's name as papers and the hub both have it: "meta-llama/Llama-2-7b-chat-hf" is "llama-2-7b-chat"."""
    return re.sub("^meta-|-instruct$|-hf$", "", name.rsplit("/", 1)[-1].lower())


def printed_tables(composed):
    """The items of published tables: item, table, and the configurations of its runs with real models."""
    for item in ITEMS.values():
        made = [composed[run_of(step)] for step in item.real if isinstance(step, EvalRun)]
        for number in item.tables if made else ():
            if item.number == f"table {number.partition(' ')[0]}":
                yield item, published.tables(item.paper)[number], made


def test_real_runs_have_every_length_that_is_printed(composed):
    for item, table, made in printed_tables(composed):
        if table["benchmark"] == "ruler":
            of_all = [1024 * int(column[:-1]) for column in table["columns"]] if table["by"] == "length" else []
            wanted = {(plain(row["model"]), n) for row in table["rows"] for n in of_all or [row["length"]]}
            there = {(plain(run["model"]["name"]), n) for run in made for n in run["benchmark"]["lengths"]}
            assert wanted <= there, item.id


PRINTED = re.compile(
    r"(?:(?P<tokens>SnapKV|H2O)(?: \+ )?)?"
    r"(?:(?P<channels>ThinK|IAP) (?P<ratio>\d+)%(?: of K, (?P<values>\d+)% of V)?)?(?:, KV size (?P<budget>\d+))?"
)


def choices(given):
    """What a method's configuration chooses, as the groups of `PRINTED`; shares in per cent."""
    tokens, channels = given.get("tokens") or {}, given.get("channels") or {}
    share = {name: round(100 * channels[name]) for name in ("ratio", "values") if channels.get(name)}
    found = {"tokens": tokens.get("name"), "channels": channels.get("name"), "budget": tokens.get("budget"), **share}
    return {name: str(value) for name, value in found.items() if value}


def test_real_runs_have_every_model_size_and_ratio_that_is_printed(composed):
    for item, table, made in printed_tables(composed):
        there = [(plain(run["model"]["name"]), choices(given)) for run in made
                 for given in expanded(run["method"]).values()]  # fmt: skip
        for row in table["rows"]:
            model, printed = plain(row["model"]), PRINTED.fullmatch(row["method"])
            assert model in {name for name, _ in there}, item.id
            if item.paper in ("think", "iap") and printed:  # not dense, Palu or ASVD
                wanted = {name: value.lower() for name, value in printed.groupdict().items() if value}
                assert (model, wanted) in there, (item.id, row["method"])


def test_iaps_presets_score_no_key_that_stays_whole(composed):
    of_iap = [given for run in composed.values() for given in expanded(run["method"]).values()
              if choices(given).get("channels") == "iap" and "window" in given]  # fmt: skip
    assert {given["window"] for given in of_iap} == {32, 64, 128}
    assert all(given["channels"].get("recent", IAP().recent) == given["window"] for given in of_iap)


@pytest.mark.parametrize("real", [False, True])
def test_equal_memory_is_equal(real, composed):
    item = find("think:table7")
    run = composed[run_of((item.real if real else item.here)[0])]
    config = MistralConfig(sliding_window=None) if real else load_config(ModelConfig())[0]
    made = {label: method_bytes(build_method(label, given, run["cache"]), config, 3000, 2)
            for label, given in expanded(run["method"]).items()}  # fmt: skip
    for tokens in ("snapkv", "h2o"):
        alone, pruned = ([made[label] for label in made if re.fullmatch(rf"{tokens}{kind}_\d+.*", label)]
                         for kind in ("", "_think"))  # fmt: skip
        assert len(alone) == (4 if real else 1)
        assert alone == pytest.approx(pruned, rel=0.005)


@pytest.mark.parametrize("names", [("duo_attention", "duo_leank"), ("quest", "quest_leank"), ("kivi2", "kivi2_leank")])
def test_with_leank_and_without_it_as_many_tokens_are_whole(names, composed):
    runs = [run for run in composed.values() if {*names} <= {*run["method"]}]
    assert len(runs) >= 2
    for run in runs:
        first, second = (build_method(name, run["method"][name], run["cache"]) for name in names)
        assert (first.sink, first.window, first.flush) == (second.sink, second.window, second.flush)


def test_every_item_says_what_makes_it_or_why_nothing_does():
    for item in ITEMS.values():
        assert item.shows
        if status(item) != "nothing to measure":
            assert item.claim, item.id
            assert commands(item), item.id
        else:
            assert item.note, item.id
        if status(item).startswith("needs"):
            assert commands(item), item.id
        if item.real and not item.here:
            assert item.needs, item.id
    assert sum(map(runs, ITEMS.values())) >= 66


def test_a_step_whose_model_is_not_there_is_named_and_not_made(tmp_path):
    there, absent = (EvalRun(("x",), need=Need(name, str(path))) for name, path in
                     (("a folder", tmp_path), ("the model huge", tmp_path / "huge")))  # fmt: skip
    item = Item("lethe:table1", "x", here=(there, absent))
    assert status(item) == "runs here, in part: needs the model huge"
    assert Options().steps(item) == (there,)
    assert status(replace(item, here=(absent,))) == "needs the model huge"
    assert status(replace(item, here=(there,))) == "runs here"


def test_commands_name_files_that_are_there():
    for _, step in STEPS:
        line = step.line if isinstance(step, Command) else step.command if isinstance(step, EvalRun) else ""
        for module in re.findall(r"-m (scripts[\w.]+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        for experiment in re.findall(r"leank_train.*\+experiment=(\w+)", line):
            assert (ROOT / "conf" / "train" / "experiment" / f"{experiment}.yaml").is_file()
        for mask in re.findall(r"mask=(\S+)", line):
            assert (ROOT / mask).is_file()


def test_what_an_item_needs_keeps_its_capitals():
    text = of_item(Made(find("asl:table2")), ROOT)
    assert "Needs Llama-3.1-Nemotron-8B-UltraLong-1M-Instruct" in text


@pytest.mark.parametrize("spelling", ["LeanK:Figure7", "leank:fig7", "leank: figure 7"])
def test_an_item_by_its_name(spelling):
    assert find(spelling).id == "leank:fig7"


def test_an_unknown_item_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"leank:fig77 is no item; did you mean leank:fig7, .*--list shows all"):
        find("leank:fig77")
    with pytest.raises(ValueError, match="--paper quest is unknown; choose from leank, think"):
        of_papers(["quest"])
