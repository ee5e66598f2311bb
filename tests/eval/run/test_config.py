"""Configs of a run: what cannot be used is named before weights are loaded, and methods of one size are matched."""

import copy
import json
import logging
from pathlib import Path

import pytest
import torch

from leank.conf.eval import method_options
from leank.data_gen.tasks import RULER_NIAH
from leank.eval.__main__ import run
from leank.eval.benchmarks.base import Cell, Row
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prompts import encode, overhead
from leank.eval.methods import AXES, REGISTRY, build_method, name_of
from leank.eval.methods.memory import share_of_dense
from leank.eval.report.summary import summarise
from leank.eval.rows import read
from leank.eval.run.build import build_job, expanded
from leank.mask import ChannelMask
from tests import ROOT
from tests.helpers.composed import evaluation

CONF = ROOT / "conf" / "eval"
REFERENCE = (7, 4, 64)
THINK = {"tokens": {"name": "snapkv"}, "channels": {"name": "think"}, "sink": 0, "window": 32}  # of `each`
MASK = "models/reference/mask_70pct.safetensors"


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """Paths of a mask that fits the reference model, and of one that does not."""
    folder = tmp_path_factory.mktemp("masks")
    for name, shape in (("fits", REFERENCE), ("other", (2, 2, 8))):
        ChannelMask(torch.ones(shape, dtype=torch.bool), {"model": f"some/{name}"}).save(folder / f"{name}.safetensors")
    return folder


def job(*overrides):
    return build_job(evaluation(*overrides))


def test_reference_ruler(masks):
    made, tokenizer = job("+experiment=reference_ruler", f"mask={masks / 'fits.safetensors'}")
    assert [m.label for m in made.methods] == ["dense", "leank", "lowest_frequencies"]
    assert {(m.sink, m.window, m.flush) for m in made.methods if m.axes} == {(16, 144, 32)}
    assert {c.length for c in made.benchmark.cells()} == {1024, 2048, 4096}
    row = made.benchmark.row(Cell("vt", 1024, ("0",)), "0", tokenizer, 0)
    prompt = encode(tokenizer, row)
    assert len(prompt.ids) + row.max_new_tokens <= 1024
    assert tokenizer.decode(prompt.ids[prompt.question :]).strip().startswith("Question")


def test_reference_masks_makes_the_headline_table(monkeypatch):
    monkeypatch.chdir(ROOT)  # its masks are in the repository
    made, _ = job("+experiment=reference_masks", "+method.mine.channels={name:leank,mask:" + MASK + "}")
    learned = [f"leank_{ratio}pct_seed{seed}" for ratio in (70, 80) for seed in (1, 2)]
    untrained = [f"{m}_{r}pct" for m in ("lowest_frequencies", "think", "static_norm") for r in (70, 80)]
    assert {m.label for m in made.methods} == {"dense", "mine", *learned, *untrained}
    for one in made.methods:
        if one.label in learned:
            assert one.channels.loaded.metadata["ratio"] == int(one.label[6:8]) / 100
            assert one.channels.loaded.metadata["seed"] == int(one.label[-1])
        elif one.label in untrained:
            assert one.channels.ratio == int(one.label[-5:-3]) / 100
    assert {(m.sink, m.window, m.flush) for m in made.methods if m.axes} == {(16, 144, 32)}
    assert sorted({c.task for c in made.benchmark.cells()}) == sorted(RULER_NIAH)
    assert {(c.length, len(c.samples)) for c in made.benchmark.cells()} == {(1024, 100), (2048, 100), (4096, 100)}
    assert made.benchmark.split == "test"


def test_every_method_builds_and_goes_by_its_name(masks):
    names = method_options()
    given = evaluation(f"method=[{','.join(names)}]", f"mask={masks / 'fits.safetensors'}")["method"]
    assert list(given) == names
    for name, settings in given.items():
        made = build_method(name, settings, {"sink": 3})
        assert made.sink == settings.get("sink", 3)
        assert {axis: name_of(choice) for axis, choice in made.axes.items()} == {
            axis: settings[axis]["name"] for axis in AXES if axis in settings
        }


def test_every_choice_has_a_configuration_of_its_own():
    alone = {*method_options()}
    assert {choice for names in REGISTRY.values() for choice in names} | {"dense"} <= alone


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "experiment").glob("*.yaml") if "eval" in p.read_text()
                                        or "/benchmark" in p.read_text()))  # fmt: skip
def test_every_experiment_composes(name):
    assert evaluation(f"+experiment={name}")["method"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "mask is not set; give mask=PATH"),
        (["mask=nowhere.safetensors"], "mask=nowhere.safetensors does not exist"),
        (["mask={other}"], r"mask=.*other.*model some/other.*\[2, 2, 8\].*\[7, 4, 64\]"),
        (
            ["method=[dense]", "benchmark.tasks=[niah_single_9]"],
            "'niah_single_9' is unknown; choose from niah_single_1",
        ),
        (["method=[dense]", "benchmark.lengths=[64]"], "length=64 is too short for task 'niah_single_1'"),
        (["method=[dense]", "benchmark.lengths=[9999]"], "9999 is more than the model's max_position_embeddings=8192"),
        (["method=[dense]", "benchmark.essays=no/such.txt"], "no/such.txt"),
        (["method=[dense]", "+benchmark.depth=3"], "benchmark.depth is no setting; there are tasks"),
        (["method=[dense]", "benchmark.name=ruller"], "benchmark.name='ruller' is unknown; choose one of"),
        (
            ["method=[pca]", "+method.pca.bits.length=9999"],
            "pca.bits.length=9999 is more than the model's max_position",
        ),
        (["method=[dense]", "model.name=no/such/folder"], "model.name=.no/such/folder.: there is no such file"),
        (["method=[dense]", "model.chat=true"], "no chat template"),
        (["method=[]"], "method is empty"),
        (["method=[snapkv]", "method.snapkv.tokens=h2o"], "method.snapkv.tokens='h2o' is no choice; give {name: h2o}"),
        (["method=[random]", "method.random.channels.name=rnd"], "name='rnd' is unknown; choose one of by_length"),
        (["method=[dense]", "+method.h2o.window=9"], "method.h2o has no choice on any axis .*only window"),
    ],
)
def test_bad_input_is_named(overrides, message, masks):
    filled = [o.replace("{other}", str(masks / "other.safetensors")) for o in overrides]
    lengths = [] if any("lengths" in o for o in filled) else ["benchmark.lengths=[1024]"]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        job(*lengths, *filled)


def test_samples_of_a_file_are_taken_by_op_and_cut_to_the_model(tmp_path):
    lines = [
        {"problem": "A is 3. ", "question": "What is A?", "answer": 3, "op": op, "d": 2, "length": "8k",
         "template": "crazy_zootopia", "mode": "normalforward"}
        for op in (2, 4, 5) for _ in range(3)
    ]  # fmt: skip
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made, tokenizer = job("method=[dense]", "benchmark=gsm_infinite", f"benchmark.path={tmp_path}/gsm.jsonl",
                          "benchmark.samples=2", "max_new_tokens=16")  # fmt: skip
    (cell,) = made.benchmark.cells()
    assert (cell.task, cell.samples) == ("medium 8k", ("1", "2", "4", "5"))
    assert made.benchmark.row(cell, "4", tokenizer, 0).answers == [3]
    text = " ".join(f"Sentence {i}." for i in range(4000))
    article = {"_id": "a", "context": text, "input": "", "answers": ["x"], "length": 8000}
    (tmp_path / "multi_news.jsonl").write_text(json.dumps(article) + "\n")
    given = ("method=[dense]", "benchmark=longbench", f"benchmark.path={tmp_path}", "benchmark.tasks=[multi_news]")
    made, tokenizer = job(*given)
    row = made.benchmark.row(made.benchmark.cells()[0], "0", tokenizer, 0)
    assert 8192 - 32 < len(encode(tokenizer, row).ids) + row.max_new_tokens <= 8192


def test_a_mask_is_known_by_its_contents(masks, tmp_path):
    """A copy gives the same rows, a mask trained anew gives new ones."""
    path = masks / "fits.safetensors"
    again, other = tmp_path / "copy.safetensors", tmp_path / "other.safetensors"
    again.write_bytes(path.read_bytes())
    keep = torch.ones(REFERENCE, dtype=torch.bool)
    keep[0, 0, 0] = False
    ChannelMask(keep).save(other)
    configs = [
        build_method("leank", {"channels": {"name": "leank", "mask": str(p)}}).config() for p in (path, again, other)
    ]
    assert configs[0] == configs[1] != configs[2]


TEMPLATE = "{{ bos_token }} {% for m in messages %}user says {{ m.content | trim }}{% endfor %} assistant says"


def test_chat_template_wraps_the_prompt_and_the_prefix_follows():
    _, plain = load_config(ModelConfig())
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATE
    row = Row("t", "0", " one two three.", " What is two?", ("x",), 4, "ruler_all", answer_prefix=" It is")
    prompt = encode(tokenizer, row)
    text = plain.decode(prompt.ids)
    assert " ".join(text.split()) == "<s> user says one two three. What is two? assistant says It is"
    assert plain.decode(prompt.ids[prompt.question :]).split()[0] == "What"
    bare = encode(tokenizer, Row(**{**row.__dict__, "chat": False}))
    assert " ".join(plain.decode(bare.ids).split()) == "<s> one two three. What is two? It is"
    assert plain.decode(bare.ids[bare.question :]).split()[0] == "What"
    assert overhead(plain) == 0
    assert overhead(tokenizer) == len(prompt.ids) - len(plain(row.prompt + row.answer_prefix)["input_ids"]) + 1


def test_what_is_refused_has_logged_nothing(caplog):
    """A log that is not empty would keep the folder of a run that was refused."""
    spans = ["cache.window=100", f"mask={ROOT / MASK}", "benchmark.tasks=[niah_single_1]"]
    with pytest.raises(ValueError, match="length=64 is too short"):
        job(*spans, "benchmark.lengths=[64]")
    assert not caplog.messages
    job(*spans, "benchmark.lengths=[1024]")
    assert "mask was trained with window=144; cache.window=100" in caplog.messages


def test_every_combination_is_a_method_of_its_own():
    given = {"a": {**THINK, "each": {"tokens": {"budget": [64, 128]}, "channels": {"ratio": [0.4, 0.5]}}}, "dense": {}}
    found = expanded(given)
    assert list(found) == ["a_64_0.4", "a_64_0.5", "a_128_0.4", "a_128_0.5", "dense"]
    made = build_method("a_128_0.4", found["a_128_0.4"])
    assert (made.tokens.budget, made.channels.ratio, made.window) == (128, 0.4, 32)
    assert "budget" not in THINK["tokens"]


def test_each_takes_settings_of_the_cache_and_files_by_name_or_pattern(tmp_path):
    found = expanded({"m": {"channels": {"name": "leank"}, "each": {"window": [8], "channels": {"mask": ["x/y.pth"]}}}})
    assert found == {"m_8_y": {"channels": {"name": "leank", "mask": "x/y.pth"}, "window": 8}}
    for name in ("b.pth", "a.pth", "c.txt"):
        (tmp_path / name).touch()
    assert list(expanded({"m": {"each": {"channels": {"mask": f"{tmp_path}/*.pth"}}}})) == ["m_a", "m_b"]


def test_masks_of_the_package_are_found_from_any_folder(tmp_path, monkeypatch):
    given = {
        "m": {"channels": {"name": "leank"}, "each": {"channels": {"mask": f"{Path(MASK).parent}/mask_*.safetensors"}}}
    }
    in_checkout = expanded(given)
    monkeypatch.chdir(tmp_path)
    assert expanded(given) == in_checkout
    for label, one in in_checkout.items():
        assert build_method(label, one).channels.loaded.keep.any()


@pytest.mark.parametrize(
    "each", [3, {}, [1], {"tokens": {"budget": 5}}, {"tokens": {"budget": []}}, {"channels": {"mask": "no/*.pth"}}]
)
def test_what_is_no_list_of_values_is_refused(each):
    with pytest.raises(ValueError, match=r"method\.m\.each.*must be a list of values.*or a pattern that matches files"):
        expanded({"m": {**THINK, "each": each}})
    with pytest.raises(ValueError, match=r"method\.m_8 is there twice"):
        expanded({"m": {**THINK, "each": {"window": [8]}}, "m_8": THINK})


@pytest.mark.parametrize("device", ["", " ", "gpu", "cuda:x", "meta", "cuda:99", "xpu", "hpu", "mps:7"])
def test_a_device_that_is_none_or_of_another_machine_is_named(device):
    with pytest.raises(ValueError, match=f"model.device='{device}' is no device of this machine"):
        ModelConfig(device=device).identity()


MODEL, _ = load_config(ModelConfig())
SMALL = ("+experiment=reference_methods", "benchmark.samples=1", "benchmark.tasks=[niah_single_2,vt]")


def test_every_cell_is_brought_to_the_bytes_of_the_named_method(caplog):
    with caplog.at_level(logging.WARNING, "eval"):
        job, tokenizer = build_job(evaluation(*SMALL, "benchmark.lengths=[1024,1536]"))
    assert len(job.by_cell) == 4
    settings = []
    for cell, methods in job.by_cell.items():
        rows = [job.benchmark.row(cell, sample, tokenizer, 0) for sample in cell.samples]
        lengths = [len(encode(tokenizer, row).ids) for row in rows]
        by_label = {method.label: method for method in methods}
        assert list(by_label) == [method.label for method in job.methods]
        wanted = share_of_dense(by_label["leank"], MODEL, lengths, 4)
        moved = {label for label, method in by_label.items() if method.matched is not None}
        assert {"snapkv", "h2o", "pyramidkv", "streaming_llm", "gemfilter", "fastkv", "asl", "snapkv_think"} <= moved
        for label in moved:
            assert share_of_dense(by_label[label], MODEL, lengths, 4) == pytest.approx(wanted, rel=0.03), label
            assert by_label[label].config()["matched"]["to"] == "leank"
        for label in by_label.keys() - moved:
            assert f"{label} keeps its settings" in caplog.text or label in ("dense", "leank")
            assert by_label[label] == next(method for method in job.methods if method.label == label)
        settings.append(by_label["snapkv"].tokens.budget)
    assert len(set(settings)) == 4  # by length and by task


def test_rows_carry_the_settings_and_the_report_shows_one_method(tmp_path):
    benchmark = ("benchmark.lengths=[640,704]", "benchmark.tasks=[niah_multikey_2]", "benchmark.samples=1")
    given = evaluation(
        "+experiment=reference_ruler", "method=[dense,snapkv,think]", "match=0.7", "max_new_tokens=2", *benchmark
    )
    assert run(given, tmp_path) == 6
    assert run(given, tmp_path) == 0  # the same settings are found again
    rows = list(read(tmp_path))
    found = {(row["method"], row["length"]): row["settings"]["method"] for row in rows}
    assert found["snapkv", 640]["matched"] == {"settings": ["tokens.budget"], "to": 0.7}
    assert found["snapkv", 640]["tokens"]["budget"] < found["snapkv", 704]["tokens"]["budget"]
    assert len({row["config"] for row in rows if row["method"] == "snapkv"}) == 2
    (report,) = summarise(rows)["runs"]
    assert [cell["method"] for cell in report["overall"]] == ["dense", "snapkv", "think"]
    for row in rows:
        held = row["cache_bytes"]["total"] - row["cache_bytes"].get("tables", 0) - row["cache_bytes"].get("slack", 0)
        dense = 2 * 7 * 4 * 64 * 4 * row["prompt_tokens"]
        assert held / dense == pytest.approx(1 if row["method"] == "dense" else 0.7, rel=0.03)


def test_the_reference_model_s_settings_are_those_of_the_methods():
    """One label, one axis, the same choices."""
    names = method_options("method/reference")
    usual = evaluation(f"method=[{','.join(names)}]")["method"]
    own = evaluation(f"method=[{','.join(f'reference/{name}' for name in names)}]")["method"]
    assert list(usual) == list(own) == names
    for name in names:
        ours, theirs = ({axis: one["name"] for axis, one in x[name].items() if axis in AXES} for x in (usual, own))
        assert ours == theirs
        assert usual[name] != own[name]


@pytest.mark.parametrize("compress", ["after_question", "before_question"])
def test_bytes_are_those_of_the_tokens_that_are_compressed(compress):
    given = evaluation(
        "+experiment=reference_ruler", "method=[snapkv]", "match=0.7", f"compress={compress}", "benchmark.samples=1",
        "benchmark.lengths=[704]", "benchmark.tasks=[niah_multikey_2]",
    )  # fmt: skip
    job, tokenizer = build_job(given)
    ((cell, (method,)),) = job.by_cell.items()
    prompt = encode(tokenizer, job.benchmark.row(cell, "0", tokenizer, 0))
    tokens = {"after_question": len(prompt.ids), "before_question": prompt.question}
    shares = {name: share_of_dense(method, MODEL, [length], 4) for name, length in tokens.items()}
    near = min(shares, key=lambda name: abs(shares[name] - 0.7))
    assert near == compress
    assert shares[near] == pytest.approx(0.7, abs=2 / tokens[near])


@pytest.mark.parametrize("to", ["lethe", "nobody", 0, 1.5])
def test_bad_targets_are_named(to):
    overrides = ("method=[dense,lethe]", "benchmark.lengths=[1024]", "benchmark.samples=1", f"match={to}")
    with pytest.raises(ValueError, match=f"match={to}: .*give a share of dense bytes or one of dense, lethe"):
        build_job(evaluation(*overrides))
