"""Several processes train what one trains: data, sequence and weights divided among ranks."""

import json
import os
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from leank import backbone as backbones
from leank.data_gen.tasks import Mixture
from leank.mask import ChannelMask
from leank_train import data
from leank_train.data import RetrievalData, Steps, collate
from leank_train.forward import fused, sequence_parallel, stored
from leank_train.forward.branching import prefill
from leank_train.forward.sequence_parallel import block_attention, prefill_in_shares, share
from leank_train.recipes import check
from leank_train.running.parallel import shard
from leank_train.train import run
from tests.conftest import tiny_model
from tests.helpers.branches import DOCUMENTS, batch, pad, step
from tests.helpers.families import build
from tests.helpers.ranks import SETTINGS, forked_ranks, record, two_ranks
from tests.helpers.tiny_run import alpha, settings

LONG = [
    *SETTINGS, "data.questions=2", "data.min_length=450", "data.max_length=500", "stage1.steps=2", "stage2.steps=1",
    "stage2.empty_heads=drop",
]  # fmt: skip
STEERED = [
    "stage1=steered", "stage2=kl", "model.dtype=float64", "stage1.steps=3", "stage2.steps=1", "stage1.lr=0.1",
    "stage2.lr=0.05",
]  # fmt: skip
TIED = ["+model.overrides.tie_word_embeddings=true"]
PAPER = [*SETTINGS, "stage1.reduction=paper", "stage2.reduction=paper"]
SEQUENCE = ["trainer.sequence_parallel=2"]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("trainer", "devices", "settings_of_all", "of_ranks", "documents"),
    [
        ("ddp", 2, SETTINGS, [], 2),
        pytest.param("ddp", 2, PAPER, [], 2, marks=slow),
        ("sequence_parallel", 2, LONG, [*SEQUENCE, "data.documents=2"], 2),  # uneven lengths, padded
        pytest.param("sequence_parallel", 4, LONG, SEQUENCE, 2, marks=slow),  # two groups
        pytest.param("fsdp", 2, LONG, [], 2, marks=slow),
        pytest.param("fsdp", 2, LONG, SEQUENCE, 1, marks=slow),
        pytest.param("ddp", 2, STEERED, [], 2, marks=slow),
        pytest.param("sequence_parallel", 2, STEERED, SEQUENCE, 1, marks=slow),
        ("fsdp", 2, STEERED, [], 2),
        pytest.param("fsdp", 2, [*STEERED, *TIED], [], 2, marks=slow),
    ],
)
def test_ranks_learn_what_one_process_learns(
    model_folder, tmp_path, trainer, devices, settings_of_all, of_ranks, documents
):
    """`documents` of one process are those of all ranks in a step."""
    output = forked_ranks(
        model_folder, tmp_path, "ranks", *settings_of_all, *of_ranks, trainer=trainer, devices=devices
    )
    assert {p.name for p in tmp_path.iterdir()} - {"ranks.log"} == {"ranks"}  # no rank has written elsewhere
    assert output.count("mask      ") == 1
    run(settings(model_folder, *settings_of_all, f"data.documents={documents}"), tmp_path / "one")
    for stage in ("stage1", "stage2"):
        for ours, theirs in zip(record(tmp_path / "ranks", stage), record(tmp_path / "one", stage), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-12)
    torch.testing.assert_close(alpha(tmp_path / "ranks"), alpha(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    ranks, one = (ChannelMask.load(tmp_path / name / "mask.safetensors") for name in ("ranks", "one"))
    assert torch.equal(ranks.keep, one.keep)


LAYOUTS = [
    *LONG, *STEERED, "stage2.steps=0", "pruning.compensation=mean", "data.calibration=3", "validation.heldout=1",
]  # fmt: skip
KINDS = {
    "layouts": [*LAYOUTS, "pruning.bytes=0.3", "pruning.align=16"],
    "factors": [*LAYOUTS, "pruning.learns=factors"],
    "closed_form": [*LAYOUTS, "stage1.steps=0"],
}
IN_STEP, IN_CLOSED_FORM = "tiny_run.at_step(3)", "tiny_run.die_at_file('closed_form.ckpt', 'after')"


@pytest.fixture(scope="module")
def alone(model_folder, tmp_path_factory):
    """The run of a kind in one process, with two documents a step; made once."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            run(settings(model_folder, *KINDS[kind], "data.documents=2"), made[kind])
        return made[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "trainer", "death"),
    [
        ("layouts", "ddp", IN_STEP),
        ("layouts", "fsdp", IN_CLOSED_FORM),
        ("layouts", "sequence_parallel", ""),
        pytest.param("layouts", "sequence_parallel", IN_STEP, marks=slow),
        pytest.param("factors", "ddp", IN_CLOSED_FORM, marks=slow),
        pytest.param("factors", "fsdp", IN_STEP, marks=slow),
        pytest.param("factors", "sequence_parallel", IN_CLOSED_FORM, marks=slow),
        *(pytest.param("closed_form", one, "", marks=slow) for one in ("ddp", "fsdp", "sequence_parallel")),
    ],
)
def test_killed_ranks_go_on_to_the_means_layouts_and_verdict_of_one_process(
    model_folder, tmp_path, alone, kind, trainer, death
):
    """In float64, sums differ by their order alone; three documents leave one rank without any in the second round."""
    more = [*SEQUENCE, "data.documents=2"] if trainer == "sequence_parallel" else []
    if death:
        forked_ranks(model_folder, tmp_path, "ranks", *KINDS[kind], *more, trainer=trainer, death=death)
        assert not (tmp_path / "ranks/mask.safetensors").exists()
    output = forked_ranks(model_folder, tmp_path, "ranks", *KINDS[kind], *more, trainer=trainer)
    assert output.count("mask      ") == len(re.findall("^verdict: measures .*: 0 of", output, re.MULTILINE)) == 1
    ours, theirs = tmp_path / "ranks", alone(kind)
    kept = [torch.load(out / "checkpoints/closed_form.ckpt", weights_only=True) for out in (ours, theirs)]
    for part in ("keys", "values", "empty"):
        torch.testing.assert_close(kept[0][part], kept[1][part], rtol=1e-9, atol=1e-15)
        assert kept[0][part].any()
    if kind != "closed_form":
        for a, b in zip(record(ours, "stage1"), record(theirs, "stage1"), strict=True):
            assert a == pytest.approx(b, rel=1e-5)  # alpha is float32
    assert {f.relative_to(ours) for f in ours.rglob("*.safetensors")} == {
        f.relative_to(theirs) for f in theirs.rglob("*.safetensors")
    }
    for name in (f.relative_to(ours) for f in ours.rglob("mask*.safetensors")):
        a, b = (ChannelMask.load(out / name) for out in (ours, theirs))
        assert torch.equal(a.keep, b.keep)
        torch.testing.assert_close(a.mean_keys, b.mean_keys, rtol=1e-5, atol=1e-6)
        assert a.mean_keys.any()
        if kind == "layouts":
            assert torch.equal(a.precision.key_bits, b.precision.key_bits)
            assert torch.equal(a.precision.value_bits, b.precision.value_bits)
    a, b = (json.loads((out / "metrics.json").read_text())["verdict"] for out in (ours, theirs))
    assert {**a, "kl": None} == {**b, "kl": None}
    for name, found in a["kl"].items():
        assert found == pytest.approx(b["kl"][name], rel=1e-6)
        assert min(found.values()) > 0


FOUR = [*KINDS["layouts"], "model.dtype=float32", "stage1.steps=5"]  # a checkpoint every two steps


@pytest.fixture(scope="module")
def four_whole(model_folder, tmp_path_factory):
    """The run of four ranks that nothing ends; made once per trainer."""
    made = {}

    def of(trainer, *more):
        if trainer not in made:
            made[trainer] = tmp_path_factory.mktemp(trainer) / "whole"
            forked_ranks(model_folder, made[trainer].parent, "whole", *FOUR, *more, trainer=trainer, devices=4)
        return made[trainer]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "rank", "death"),
    [
        ("ddp", 0, IN_CLOSED_FORM),
        *(("ddp", rank, f"tiny_run.at_step({step})") for step, rank in ((1, 1), (2, 0), (3, 2), (4, 3), (5, 2))),
        ("fsdp", 2, IN_STEP),
        ("sequence_parallel", 3, IN_STEP),
    ],
)
def test_four_ranks_of_which_one_is_killed_go_on_to_the_same_result(
    model_folder, tmp_path, four_whole, trainer, rank, death
):
    """Bit by bit, because as many ranks add in the same order; two groups of two under sequence_parallel."""
    more = SEQUENCE if trainer == "sequence_parallel" else []
    one_dies = f"import os\nif os.environ['RANK'] == '{rank}':\n    {death}"
    forked_ranks(model_folder, tmp_path, "killed", *FOUR, *more, trainer=trainer, devices=4, death=one_dies)
    assert not (tmp_path / "killed/mask.safetensors").exists()
    forked_ranks(model_folder, tmp_path, "killed", *FOUR, *more, trainer=trainer, devices=4)
    ours, theirs = tmp_path / "killed", four_whole(trainer, *more)
    assert record(ours, "stage1") == record(theirs, "stage1")
    names = {file.relative_to(theirs) for file in theirs.rglob("*.safetensors")}
    assert {file.relative_to(ours) for file in ours.rglob("*.safetensors")} == names
    for name in names:
        a, b = (load_file(out / name) for out in (ours, theirs))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[part], b[part]) for part in a)
    a, b = (json.loads((out / "metrics.json").read_text())["verdict"] for out in (ours, theirs))
    assert a == b


def test_a_signal_to_one_rank_ends_all_after_their_documents(model_folder, tmp_path):
    death = """
import os, signal
from leank_train import closed_form
draw = closed_form._towards_labels
def interrupted(*given):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return draw(*given)
closed_form._towards_labels = interrupted
"""
    output = forked_ranks(model_folder, tmp_path, "ranks", *KINDS["closed_form"], death=death)
    assert output.count("stopped by SIGTERM; ") == output.count("ranks keeps its checkpoints; to go on:") == 1
    assert torch.load(tmp_path / "ranks/checkpoints/closed_form.ckpt", weights_only=True)["documents"] == 2


def test_a_rank_that_fails_ends_all_with_a_line_each(model_folder, tmp_path):
    death = """
import os
from leank_train import closed_form
def failing(*given):
    if os.environ["RANK"] == "1":
        raise ValueError("this document is damaged")
    return original(*given)
original, closed_form._towards_labels = closed_form._towards_labels, failing
"""
    output = forked_ranks(model_folder, tmp_path, "ranks", *KINDS["closed_form"], death=death)
    assert "Traceback" not in output
    assert output.count("leank_train: this document is damaged") == 1
    assert output.count("leank_train: another process of this run has ended") == 1


def test_one_rank_may_have_all_shares(model_folder, tmp_path):
    few = "data.calibration=1", "validation.heldout=0"
    forked_ranks(model_folder, tmp_path, "ranks", *KINDS["closed_form"], *few, trainer="fsdp", devices=1)
    assert (tmp_path / "ranks/mask.safetensors").exists()


def test_ranks_of_one_step_may_have_different_tasks(model_folder):
    config = check(settings(model_folder, *SETTINGS))
    mixed = config.mixture(backbones.load(str(model_folder)), per_length=2)
    assert any(mixed[i].task != mixed[i + 1].task for i in range(0, 10, 2))


def test_a_prompt_ends_in_its_answer(model_folder):
    """What precedes it is the question, of any length; moving a batch moves its ids and leaves lengths on the host."""
    backbone = backbones.load(str(model_folder))
    mixed = Mixture({"multikey": 1, "kv": 1}, backbone.tokenizer, 500, 600, per_length=2, questions=2)
    made = collate(backbone, [mixed[0], mixed[1]])
    assert (len(made.documents.ids), len(made.prompts.ids)) == (2, 4)
    for prompt, answer, before in zip(made.prompts.ids, made.answers.ids, made.question_lengths, strict=True):
        tokens = answer[: len(prompt) - before]
        assert torch.equal(prompt[before : before + len(tokens)], tokens)
    moved = made.to("meta")
    for rows in (moved.documents, moved.prompts, moved.answers):
        assert (rows.ids.device.type, rows.lengths.device.type) == ("meta", "cpu")


class Numbers:
    """A mixture whose document number i is i."""

    def __getitem__(self, index):
        return index


@given(st.integers(1, 5), st.integers(0, 50), st.integers(1, 4))
def test_any_number_of_ranks_sees_the_same_documents(quarter, start, steps):
    """At the same documents a step: the same in every step, each once, none left out between steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "collate", lambda backbone, documents: documents)
        for world in (1, 2, 4):
            ranks = [Steps(None, Numbers(), 4 * quarter // world, rank, world) for rank in range(world)]
            for item in range(steps):
                seen = [number for rank in ranks for number in rank[start + item]]
                assert seen == [*range((start + item) * 4 * quarter, (start + item + 1) * 4 * quarter)]


def test_documents_do_not_depend_on_the_number_of_ranks(model_folder):
    """What number i is, its length included: the same at the same documents a step."""
    backbone = backbones.load(str(model_folder))
    made = [
        config.mixture(backbone, per_length=config.data.documents * world)
        for world in (1, 2, 4)
        for config in [check(settings(model_folder, "++data.tasks.kv=1", f"data.documents={4 // world}"))]
    ]
    for index in range(8):
        assert made[0][index] == made[1][index] == made[2][index]
    for mixed in made:
        assert len({mixed.length_of(i) for i in range(4)}) == 1  # so that no rank waits for a longer document


@pytest.mark.slow
def test_two_ranks_killed_and_started_again(model_folder, tmp_path):
    """The first process is killed, the second one follows; both go on from the same checkpoint."""
    process = two_ranks(model_folder, tmp_path, "killed", *SETTINGS, "stage1.steps=40")
    while process.poll() is None and not (tmp_path / "killed/checkpoints/stage1/last.ckpt").exists():
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)  # ends when the second process has closed its output, too
    assert not (tmp_path / "killed/mask.safetensors").exists()
    for out in ("killed", "whole"):
        process = two_ranks(model_folder, tmp_path, out, *SETTINGS, "stage1.steps=40")
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert torch.equal(alpha(tmp_path / "killed"), alpha(tmp_path / "whole"))


def test_ranks_of_a_context_see_the_same_documents(model_folder):
    backbone = backbones.load(str(model_folder))
    mixture = Mixture({"multikey": 1, "kv": 1}, backbone.tokenizer, 300, 400, per_length=2)

    def first(rank, world, together):
        data = RetrievalData(backbone, mixture, together=together)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        return next(iter(data.train_dataloader())).documents.ids

    groups = [first(rank, 2, 1) for rank in range(2)]
    assert not torch.equal(*groups)
    assert all(torch.equal(first(rank, 4, 2), groups[rank // 2]) for rank in range(4))


def test_processes_that_do_not_divide_are_named(model_folder, tmp_path):
    config = settings(model_folder, "trainer=sequence_parallel", "trainer.accelerator=cpu", "trainer.devices=2")
    with pytest.raises(ValueError, match=r"sequence_parallel=4 does not divide the 2 processes of trainer.devices=2"):
        run(config, tmp_path)


def one_of_two(rank, address):
    """A rank that has half the weights finds the hidden states and the gradient that whole ones give."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{address}", timedelta(seconds=60), rank=rank, world_size=2)
    model, whole = tiny_model("llama"), tiny_model("llama")
    shard(model, torch.device("cpu"))
    documents = pad(batch()[0])
    ours, theirs = (step(m, prefill(m, documents, DOCUMENTS), 3, 6, "drop") for m in (model, whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    held = sum(p.to_local().numel() for p in model.base_model.parameters())  # after the passes: none is left whole
    assert held == sum(p.numel() for p in whole.base_model.parameters()) // 2
    dist.destroy_process_group()


def test_a_rank_holds_half_the_weights(tmp_path):
    mp.start_processes(one_of_two, (tmp_path / "address",), 2, start_method="fork")


CELL = 4  # tokens, so that these short documents have several cells
ZONES = [(3, 6), (0, 1), (8, 30), (1, 5)]  # (sink, window); in the third no token is in the middle


def one_rank(rank, world, address, flash):
    if flash:  # the flash kernel reads what it can of these few keys, as it does on a GPU
        fused.FLASH_FROM, fused.flash_takes = 1, lambda q: True
    stored.GROUP = sequence_parallel.GROUP = CELL
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{address}", timedelta(seconds=60), rank=rank, world_size=world)
    models = ((tiny_model("llama"), ZONES), *((build(name), ZONES[:1]) for name in ("qwen3", "gpt_oss", "gemma2")))
    for model, zones in models:
        documents, lengths = pad(batch()[0]), DOCUMENTS
        whole = prefill(model, documents, lengths)
        shared = prefill_in_shares(model, documents, lengths, dist.group.WORLD, sink=1, cell=2)
        columns = share(documents.shape[1], rank, world, sink=1, cell=2)
        real = columns < documents.shape[1]
        for ours, theirs in zip(shared.keys + shared.values, whole.keys + whole.values, strict=True):
            assert ours.shape[2] == len(columns) == 4 * -(-documents.shape[1] // (4 * world))
            for b, length in enumerate(lengths):
                inside = columns < length
                torch.testing.assert_close(ours[b, :, inside], theirs[b][:, columns[inside]])
        assert torch.equal(shared.k_positions[:, real], whole.k_positions[:, columns[real]])
        assert (shared.k_positions[:, ~real] == -1).all()
        for sink, window in zones:
            for empty_heads in ("drop", "zero"):
                ours, theirs = (step(model, p, sink, window, empty_heads) for p in (shared, whole))
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
            if model.config.model_type != "gemma2":  # layouts of soft-capped models are not learned
                cells = prefill_in_shares(model, documents, lengths, dist.group.WORLD, sink=sink, cell=CELL)
                ours, theirs = (step(model, p, sink, window, "zero", layout=True) for p in (cells, whole))
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="shares of a document cut cells"):
        step(
            models[0][0],
            prefill_in_shares(models[0][0], documents, lengths, dist.group.WORLD, cell=2),
            3,
            6,
            "zero",
            True,
        )
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "flash"), [pytest.param(2, False, marks=slow), (3, False), (2, True)])
def test_shares_are_one_process(world, flash, tmp_path):
    """Two documents of 23 and 17 tokens: the chunks of 2 and of 3 ranks end in padding, and a row ends in others."""
    mp.start_processes(one_rank, (world, tmp_path / "address", flash), world, start_method="fork")


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 20), st.integers(1, 9))
def test_shares_are_disjoint_and_complete_and_hold_whole_cells(tokens, world, sink, cell):
    shares = [share(tokens, rank, world, sink, cell).tolist() for rank in range(world)]
    assert sorted(column for columns in shares for column in columns) == [*range(sum(map(len, shares)))]
    assert 0 <= sum(map(len, shares)) - tokens < 2 * world * cell
    assert len({len(columns) for columns in shares}) == 1
    for columns in shares:
        assert columns == sorted(columns)
        starts = [b for a, b in zip([-1, *columns], columns, strict=False) if b != a + 1]
        assert all((start - sink) % cell == 0 for start in starts)


@given(st.integers(1, 200), st.integers(1, 8))
def test_shares_are_disjoint_complete_and_balanced(tokens, world):
    shares = [share(tokens, rank, world).tolist() for rank in range(world)]
    every = sorted(column for columns in shares for column in columns)
    assert every == list(range(len(every)))
    assert 0 <= len(every) - tokens < 2 * world
    assert all(columns == sorted(columns) for columns in shares)
    work = {sum(column + 1 for column in columns) for columns in shares}  # keys that the rank's rows see
    assert len(work) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("device", "cudnn"), [("cpu", False), *(pytest.param("cuda", c, marks=pytest.mark.gpu) for c in (False, True))]
)
def test_block_attention_is_softmax_attention(monkeypatch, device, cudnn, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, 16, generator=generator)
        for h, n in ((4, 6), (2, 6 if causal else 9), (2, 6 if causal else 9))
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    monkeypatch.setitem(sequence_parallel.SCORES_AT_ONCE, "cpu", 100)  # two rows at a time
    logits = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.3
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    wanted = logits.softmax(-1) @ v.float().repeat_interleave(2, 1), logits.logsumexp(-1)
    for ours, theirs in zip(block_attention(q, k, v, 0.3, causal, cudnn), wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(
            ours, theirs, atol=2e-2 if device == "cuda" else 1e-6, rtol=1e-2 if device == "cuda" else 1e-5
        )
