"""Every figure and table of the papers is an item, and all that items name is there."""

import copy
import functools
import re
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_module
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import CachingConfigRepository
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from transformers import MistralConfig

from leank.eval import published
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import build_method
from leank.eval.methods.channels.iap import IAP
from leank.eval.methods.memory import method_bytes
from leank.eval.papers.item import ITEMS, Contrast, find, of_papers
from leank.eval.papers.make import Made
from leank.eval.papers.page import commands, of_item
from leank.eval.run.build import expanded
from leank.typed import STRICT
from scripts.analyses import ANALYSES
from tests import ROOT
from tests.helpers.composed import evaluation

NUMBERS = {"leank": (10, 23), "think": (7, 12), "iap": (4, 8), "lethe": (6, 6), "asl": (10, 12)}
STEPS = [step for item in ITEMS.values() for step in (*item.here, *item.real)]


class Kept(CachingConfigRepository):
    """Configurations that are read once, and not for every command line anew."""

    def load_config(self, config_path):
        return copy.deepcopy(super().load_config(config_path))  # composing changes some of them


@pytest.fixture(scope="module")
def composed():
    """The configuration of every replay, by its command line; resolved, and without weights."""
    lines = {step.line() for step in STEPS if step.replays}
    with pytest.MonkeyPatch.context() as patch, initialize_config_module("leank.conf.eval", version_base="1.3"):
        patch.setattr(config_loader_impl, "CachingConfigRepository", functools.cache(Kept))
        return {line: OmegaConf.to_container(compose("eval", [*line[1:]]), resolve=True) for line in lines}


def replays(steps, composed):
    return [composed[step.line()] for step in steps if step.replays]


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_number_is_there_once(paper):
    figures, tables = NUMBERS[paper]
    wanted = [*(f"figure {n + 1}" for n in range(figures)), *(f"table {n + 1}" for n in range(tables))]
    items = of_papers([paper])
    assert [item.number for item in items] == wanted
    assert len({item.id for item in items}) == len(items)


def test_every_run_composes_and_its_methods_are_checked(composed):
    for config in composed.values():
        labels = expanded(config["method"])
        assert {build_method(label, given, config["cache"]).label for label, given in labels.items()} == {*labels}


def test_the_quick_form_composes_as_well():
    quick = {step.line(quick=True) for step in STEPS if step.replays and step.quick}
    assert all(evaluation(*line[1:])["benchmark"]["samples"] < 50 for line in quick)


def test_checks_compare_methods_that_the_item_runs(composed):
    for item in ITEMS.values():
        for check in item.checks:
            if isinstance(check, Contrast):
                runs = replays(item.here, composed)
                assert any({check.first, check.second} <= {*expanded(run["method"])} for run in runs), item.id
            else:
                assert any("scripts.analyses" in step.words for step in item.here), item.id
                assert (check.above is None) != (check.below is None)


def test_analyses_take_their_settings():
    models = set()
    for step in STEPS:
        if step.words[0] == "scripts.analyses":
            _, name, out, *given = step.line(quick=True)
            hints = get_type_hints(ANALYSES[name].measure, include_extras=True)
            own = [one for one in given if one.partition("=")[0] in hints]
            for key, value in OmegaConf.to_container(OmegaConf.from_dotlist(own)).items():
                TypeAdapter(hints[key], config=STRICT).validate_python(value)
            assert out == "OUT"
            models |= {*given} - {*own, "model=null"}
    assert {one.partition("=")[0] for one in models} <= {"model", "mask"}
    for one in models:
        assert evaluation(one)


def test_published_tables_are_there():
    for item in ITEMS.values():
        assert {*item.tables} <= {*published.tables(item.paper)}, item.id


def plain(name):
    """A model's name as papers and the hub both have it: "meta-llama/Llama-2-7b-chat-hf" is "llama-2-7b-chat"."""
    return re.sub("^meta-|-instruct$|-hf$", "", name.rsplit("/", 1)[-1].lower())


def printed_tables(composed):
    """The items of published tables: item, table, and the configurations of its runs with real models."""
    for item in ITEMS.values():
        made = replays(item.real, composed)
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
    run = replays(item.real if real else item.here, composed)[0]
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
        if item.status != "nothing to measure":
            assert item.claim, item.id
            assert commands(item), item.id
        else:
            assert item.note, item.id
        if item.status.startswith("needs"):
            assert commands(item), item.id
        if item.real and not item.here:
            assert item.needs, item.id
    assert sum(item.runs for item in ITEMS.values()) >= 66


def test_commands_name_files_that_are_there():
    for step in STEPS:
        if step.words[0].startswith("scripts.bench"):
            assert (ROOT / f"{step.words[0].replace('.', '/')}.py").is_file()
        for experiment in re.findall(r"leank_train.*\+experiment=(\w+)", step.run):
            assert (ROOT / "conf" / "train" / "experiment" / f"{experiment}.yaml").is_file()
        for mask in re.findall(r"mask=(\S+)", step.run):
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
