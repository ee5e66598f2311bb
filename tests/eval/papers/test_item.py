"""Items of eval/papers: what one runs, whether its rows are what the paper says, and how its page is made."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pandas as pd
import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from transformers import MistralConfig

from leank.eval import published
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.methods import build_method
from leank.eval.methods.channels.iap import IAP
from leank.eval.methods.memory import method_bytes
from leank.eval.papers import judge, make
from leank.eval.papers.item import ITEMS, Contrast, Expect, Item, find, of_papers
from leank.eval.papers.make import Made, Runner, commands, of_item, page
from leank.eval.report.groups import frame
from leank.eval.run.build import expanded
from leank.typed import STRICT
from scripts.analyses import analysis_of
from tests import ROOT
from tests.helpers.composed import evaluation
from tests.helpers.report_rows import row

NUMBERS = {"leank": (10, 23), "think": (7, 12), "iap": (4, 8), "lethe": (6, 6), "asl": (10, 12)}
STEPS = [step for item in ITEMS.values() for step in (*item.here, *item.real)]


@pytest.fixture(scope="module")
def composed():
    """The configuration of every replay, by its command line; resolved, and without weights."""
    lines = {step.line() for step in STEPS if step.replays}
    return {line: evaluation(*line[1:]) for line in lines}


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
            hints = get_type_hints(analysis_of(name).measure, include_extras=True)
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
        for line in table["rows"]:
            model, printed = plain(line["model"]), PRINTED.fullmatch(line["method"])
            assert model in {name for name, _ in there}, item.id
            if item.paper in ("think", "iap") and printed:  # not dense, Palu or ASVD
                wanted = {name: value.lower() for name, value in printed.groupdict().items() if value}
                assert (model, wanted) in there, (item.id, line["method"])


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


def test_an_item_by_its_name():
    assert find("leank:fig7").id == "leank:fig7"
    with pytest.raises(ValueError, match=r"leank:fig77 is no item; .*--list shows all"):
        find("leank:fig77")


def rows(method, scores, task="vt", bytes_=100.0, first=None, **more):
    seconds = [{"first_token": first and first + i / 100, "per_token": None} for i in range(len(scores))]
    return [row(method, i, score, task, cache_bytes={"total": bytes_}, seconds=seconds[i], **more)
            for i, score in enumerate(scores)]  # fmt: skip


def contrast(check, made):
    (claim,) = Item(id="think:fig1", shows="x", checks=[check]).checks
    return judge.contrast(claim, [frame(made)] if made else [])


def expect(found, of="kind == 'a'", **more):
    claim = TypeAdapter(Expect).validate_python({"mean": "x", "of": of, **({} if "below" in more else {"above": 0.0}),
                                                 **more})  # fmt: skip
    return judge.expect(claim, pd.DataFrame(found))


BETTER = [*rows("a", [1.0] * 20), *rows("b", [0.0] * 10 + [1.0] * 10)]


def test_a_claim_that_shows_and_its_opposite():
    found = contrast("a - b > 0", BETTER)
    assert found.verdict == "shows"
    assert found.sentence.startswith("a minus b, above 0: +50.0 points [+")
    assert found.sentence.endswith(", 100.0 against 50.0, n = 20. The claim shows here.")
    against = contrast("b - a > 0", BETTER)
    assert (against.verdict, against.sentence.endswith("This contradicts the paper.")) == ("contradicts", True)


def test_a_margin_decides_where_methods_are_equal():
    equal = [*rows("a", [1.0] * 150), *rows("b", [1.0] * 150)]
    nothing = contrast("a - b > 0", equal)
    assert nothing.figures == "+0.0 points [+0.0, +0.0], 100.0 against 100.0, n = 150"
    assert nothing.sentence.endswith("Not decided: the interval holds 0. Both score alike on 100% of the samples.")
    assert contrast("a - b > -2", equal).verdict == "shows"
    few = contrast("a - b > -1", equal)  # a loss in one sample of 150 may not be among them
    assert few.why == "it takes 300 samples"
    worse = [*rows("a", [0.0] * 12), *rows("b", [1.0] * 12)]
    assert contrast("a - b > -1", worse).verdict == "contradicts"


def test_few_samples_decide_nothing():
    assert contrast("a - b > 0", [*rows("a", [1.0] * 9), *rows("b", [0.0] * 9)]).verdict == "undecided"


def test_tasks_count_alike_and_only_common_samples_count():
    two = [*rows("a", [1.0] * 30), *rows("b", [1.0] * 30), *rows("a", [1.0] * 10, "u"), *rows("b", [0.0] * 8, "u")]
    assert contrast("a - b > 0", two).figures == "+50.0 points [+50.0, +50.0], 100.0 against 50.0, n = 38"


def test_models_are_compared_each_with_itself():
    """Rows of two models have the same tasks and samples."""
    good, bad = (frame([*rows("a", [high] * 20), *rows("b", [low] * 20)]) for high, low in ((1.0, 0.5), (0.4, 0.1)))
    (claim,) = Item(id="think:fig1", shows="x", checks=["a - b > 0"]).checks
    assert judge.contrast(claim, [good, bad]).figures == "+40.0 points [+40.0, +40.0], 70.0 against 30.0, n = 40"


@pytest.mark.parametrize(("measure", "verdict"), [("bytes", "shows"), ("first_token", "contradicts")])
def test_ratios_of_bytes_and_of_seconds_are_judged(measure, verdict):
    cheap = [*rows("a", [1.0] * 12, bytes_=50.0, first=3.0), *rows("b", [1.0] * 12, first=2.0)]
    found = contrast(f"{measure} of a / b < 1", cheap)
    assert found.verdict == verdict
    assert found.sentence.startswith(f"a / b, below 1: {'0.5' if measure == 'bytes' else '1.49'} times")


def test_the_seconds_of_a_batch_are_one_measurement():
    batch = [{**one, "seconds": {"first_token": 3.0 if one["method"] == "a" else 2.0}}
             for one in (*rows("a", [1.0] * 50), *rows("b", [1.0] * 50))]  # fmt: skip
    found = contrast("first_token of a / b < 1", batch)
    assert found.figures.endswith("n = 1")
    assert found.verdict == "undecided"


def test_nothing_to_compare():
    assert contrast("a - b > 0", []) is None
    assert contrast("a - c > 0", BETTER) is None
    assert contrast("per_token of a / b < 1", BETTER) is None
    assert expect([{"kind": "b", "value": 1.0}]) is None
    assert expect([{"value": 1.0}]) is None  # the analysis with that column has failed


def test_what_is_no_check_is_refused():
    with pytest.raises(ValueError, match=r"'a > b' is no check; write one as A - B > 0"):
        Item(id="think:fig1", shows="x", checks=["a > b"])


def test_means_of_an_analysis():
    found = [{"kind": kind, "value": value} for kind in "ab" for value in ((1.0, 1.2) if kind == "a" else (0.1, 0.2))]
    found = [*found, {"kind": "a", "value": None}] * 10
    high = expect(found, above=0.9, units="heads")
    assert high.verdict == "shows"
    assert high.figures.startswith("1.1 [1.0")
    assert high.figures.endswith("n = 20 heads")
    apart = expect(found, minus="kind == 'b'")
    assert apart.sentence.startswith("x, difference, above 0: 0.95 [")
    assert apart.verdict == "shows"
    assert expect(found, below=1.5).verdict == "shows"
    assert expect(found, below=0.5).verdict == "contradicts"


def test_rows_of_the_same_prompt_are_compared_in_pairs():
    found = [
        {"kind": kind, "layer": n, "value": n + more} for kind, more in (("a", 0.5), ("b", 0.0)) for n in range(10)
    ]
    found.append({"kind": "a", "layer": 10, "value": 100.0})  # without a partner
    assert expect(found[:-1], minus="kind == 'b'").verdict == "undecided"  # layers differ more than the kinds
    paired = expect(found, minus="kind == 'b'", by=["layer"])
    assert (paired.verdict, paired.figures) == ("shows", "0.5 [0.5, 0.5], n = 10")
    assert expect(found[:10], minus="kind == 'b'", by=["layer"]) is None


def test_rows_of_a_sample_are_one_unit():
    """Twenty layers of one sample are no twenty samples: their mean counts once, and ten samples decide."""
    found = [{"sample": sample, "layer": layer, "kind": kind, "value": sample + layer + more}
             for sample in range(10) for layer in range(20) for kind, more in (("a", 0.5), ("b", 0.0))]  # fmt: skip
    claim = {"minus": "kind == 'b'", "by": ["sample", "layer"], "over": ["sample"]}
    assert expect(found, **claim).figures == "0.5 [0.5, 0.5], n = 10"
    assert expect(found, **claim).verdict == "shows"
    assert expect([one for one in found if one["sample"] < 9], **claim).why == "it takes 10 samples"
    means = expect(found, over=["sample"])
    assert means.figures.startswith("14.5 [")  # 4.5 of the samples, 9.5 of the layers, 0.5
    apart = expect(found, minus="kind == 'b'", over=["sample"])
    assert (apart.verdict, apart.figures.endswith("n = 20")) == ("undecided", True)


FAIL = "both nearly always fail, below 10 of 100 points"


@pytest.mark.parametrize(
    ("check", "first", "second", "verdict", "why"),
    [
        ("a - b > -2", 10, 10, "undecided", FAIL),
        ("a - b > 0", 12, 0, "undecided", FAIL),
        ("a - b > -2", 0, 18, "contradicts", ""),  # nine points were there to lose
        ("a - b > -8", 16, 22, "shows", ""),  # the first is below the floor because it has lost, the second is not
        ("|a - b| < 2", 200, 200, "shows", ""),
        ("|a - b| < 2", 198, 200, "undecided", "the interval holds -2"),
        ("|a - b| < 2", 200, 198, "undecided", "the interval holds 2"),
        ("|a - b| < 2", 180, 200, "contradicts", ""),
        ("|a - b| < 2", 200, 180, "contradicts", ""),
    ],
)
def test_what_there_is_to_lose_and_both_sides_of_equality(check, first, second, verdict, why):
    """Right answers of 200 samples."""
    made = [one for name, right in (("a", first), ("b", second))
            for one in rows(name, [1.0] * right + [0.0] * (200 - right))]  # fmt: skip
    found = contrast(check, made)
    assert (found.verdict, found.why) == (verdict, why)
    assert found.compared == ("a minus b, within 2" if "|" in check else f"a minus b, above {check[8:]}")


def test_few_layers_decide_nothing_and_a_count_needs_no_interval():
    found = [{"kind": "a", "layer": layer, "value": 1.0} for layer in range(7)]
    of_layers = expect(found, above=0.5, units="layers")
    assert (of_layers.verdict, of_layers.why) == ("undecided", "it takes 10 layers")
    assert of_layers.figures.endswith("n = 7 layers")
    counted = expect(found[:1], above=0.5, counted=True)
    assert (counted.verdict, counted.figures) == ("shows", "1, counted")
    chosen = expect(found * 2, above=0.5, chosen=True)
    assert chosen.sentence.endswith("The claim shows here. The bound is a choice made here, the paper gives none.")


def test_samples_in_which_a_pass_selected_no_layer_are_told():
    some = [{**one, "selected_layer": -1 if int(one["sample"]) < 5 else 5} for one in rows("a", [1.0] * 20)]
    found = contrast("a - b > 0", [*some, *rows("b", [0.0] * 20)])
    assert found.sentence.endswith("The claim shows here. In 25% of its samples a selected no layer.")


STUDY = {"run": "scripts.analyses ranks OUT length=1024 model=reference", "quick": "length=512"}
CHECK = {"mean": "what is high", "of": "measure == 'high'", "above": 1}
MADE = [
    Item(id="think:fig1", shows="first", claim="It is high.", here=[STUDY], checks=[CHECK]),
    Item(id="think:fig2", shows="second", claim="It is high.", here=["leank.eval no_such=1", STUDY], checks=[CHECK]),
]


@pytest.fixture
def typed_commands(monkeypatch):
    """Record the commands, and leave twenty rows of 2 and one without a value in their folder."""
    typed = []

    def run(command, **_):
        typed.append(command[2:])
        folder = Path(command[4])
        folder.mkdir(parents=True)
        (folder / "rows.csv").write_text("measure,value\n" + "high,2.0\n" * 20 + "high,\n")
        (folder / "figure.png").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(make.subprocess, "run", run)
    return typed


def test_commands_run_once_and_a_failing_one_stops_no_other(typed_commands, tmp_path):
    for _ in range(2):  # the second run makes nothing again
        first, second = Runner(tmp_path, quick=True).make(MADE)
    ((program, name, folder, *given),) = typed_commands
    assert (program, name, given) == ("scripts.analyses", "ranks", ["length=1024", "model=reference", "length=512"])
    assert not first.failed
    assert "no_such" in second.failed[0]
    assert [one.verdict for one in [*first.judgements, *second.judgements]] == ["shows", "shows"]
    text = page([first, second], tmp_path, quick=True)
    assert text.count("| think:fig1") == 1
    assert "Failed: no_such" in text
    assert "(analyses/ranks-" in text
    Runner(tmp_path).make(MADE[:1])  # other settings have a folder of their own
    assert {*(tmp_path / "analyses").iterdir()} == {Path(folder), Path(typed_commands[1][2])}


def test_an_analysis_that_fails_says_its_last_line(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stderr="a warning\nscripts.analyses: length=9 is too short\n")
    monkeypatch.setattr(make.subprocess, "run", lambda command, **_: failed)
    (made,) = Runner(tmp_path).make(MADE[:1])
    assert made.failed == ["scripts.analyses: length=9 is too short"]
