"""The measurements of decoding, small: that they run, and that what they say is what the cache says and reads."""

import csv
import re
import time
from types import SimpleNamespace

import pytest
import torch

from leank.eval.cache import Sizes
from leank.eval.cache.graph import CAPTURE_FOR
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import Store
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.methods.reads.double_sparsity import Labels
from leank.eval.methods.reads.quest import Quest
from scripts.bench import decoding
from scripts.bench.common import TEARDOWN, Decoding, Launches, Table, by_kind, bytes_read, profiled
from scripts.bench.decoding import contenders, fill
from tests import ROOT


def read(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_memory_saved_is_the_masks_ratio(tmp_path, capsys, drawn):
    decoding.main(["memory", str(tmp_path), "--layers", "2", "--context", "2048", "--batch", "1", "2"])
    first = capsys.readouterr().out.splitlines()[0]
    shares = [float(word.rstrip("%;,")) for word in first.split() if word.rstrip(";,").endswith("%")]
    for measured, expected in zip(shares[::2], shares[1::2], strict=True):
        assert measured == pytest.approx(expected, abs=3)
    rows = read(tmp_path / "memory.csv")
    assert [r["batch"] for r in rows] == ["1", "2"]
    assert all(float(r["leank_gb"]) < float(r["dense_gb"]) for r in rows)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_generate(tmp_path):
    line = "--shape reference --case 1x300 --new 17 --warm-up 1 --only LeanK"
    decoding.main(["generate", str(tmp_path), *line.split()])
    rows = read(tmp_path / "generate.csv")
    assert [(row["cache"], row["loop"]) for row in rows if row["step_ms"]] == [
        ("LeanK", loop) for loop in decoding.LOOPS
    ]


def test_a_step_is_captured_before_the_calls_that_are_timed(monkeypatch):
    """A call too short to capture would be timed as an eager one, and taken from a longer one of replays."""
    called = []

    def call(model, contender, rows, prompt, new, captured, cache):
        called.append(new)
        return 1.0 + 0.5 * new + (100 if len(called) == 1 else 0)

    monkeypatch.setattr(decoding, "call", call)
    contender = SimpleNamespace(name="LeanK", make=lambda rows, room: SimpleNamespace(rows=rows, room=room))
    model, row = SimpleNamespace(device=torch.device("cpu")), {}
    decoding.generate(row, model, contender, 2, 100, CAPTURE_FOR, 2, captured=True)
    assert called == [CAPTURE_FOR + 2, 2, 2, CAPTURE_FOR + 2, CAPTURE_FOR + 2]
    assert (row["step_ms"], row["first_tokens_s"]) == (500, 2)
    assert row["first_call_s"] - row["later_call_s"] == 100
    with pytest.raises(ValueError, match="too few to capture"):
        decoding.generate({}, model, contender, 2, 100, CAPTURE_FOR - 1, 2, captured=True)


def test_a_table_keeps_what_a_killed_run_measured_and_measures_failures_again(tmp_path):
    def work(row):
        row["ms"] = 1 / row["batch"]

    table = Table(tmp_path / "out/table.csv", ("cache", "batch"))
    for batch in (0, 2):
        table.add({"cache": "LeanK", "batch": batch}, work)
    with pytest.raises(SystemExit, match="failed: LeanK 0"):
        table.check()
    again = Table(table.path, table.keys)
    assert [again.has({"cache": "LeanK", "batch": batch}) for batch in (0, 2)] == [False, True]
    again.add({"cache": "LeanK", "batch": 2}, lambda row: 1 / 0)
    again.check()


def test_kernels_by_kind():
    names = {"decode": "attention_ms", "flash_fwd_splitkv_combine_kernel": "attention_ms",
             "nvjet_tst_128x8_64x12_v_bz_splitK_TNT": "products_ms", "gemvx::kernel": "products_ms",
             "Memcpy DtoD (Device -> Device)": "other_ms"}  # fmt: skip
    assert {name: Launches(name, 1, 1).kind for name in names} == names
    assert by_kind([Launches("decode", 2, 1.5), Launches("nvjet", 7, 3), Launches("add", 1, 0.5)]) == {
        "gpu_ms": 5, "attention_ms": 1.5, "products_ms": 3, "other_ms": 0.5, "kernels": 10}  # fmt: skip


def test_every_cache_decodes_what_the_model_does():
    """fill() and Decoding against a plain loop over the same keys and values."""
    found, model = [], load_model(ModelConfig())
    for contender in contenders(model, torch.ones(7, 4, 64, dtype=torch.bool), Sizes()):
        model.set_attn_implementation(contender.attention)
        cache = contender.make(2, 340)
        torch.manual_seed(0)
        fill(model, cache, 2, 300)
        steps = Decoding(model, cache, torch.full((2, 1), 300))
        tokens = []
        for _ in range(5):
            steps.step()
            tokens.append(steps.token.flatten().tolist())
        assert steps.loop.positions.tolist() == [[305], [305]]
        found.append(tokens)
    assert found[1:] == found[:1] * 3


HEADS, DIM, TOKENS = 2, 64, 64 * 4 + 8 + 32  # whole groups in the middle, so that what is held is what is read
KEEP = torch.arange(DIM) < torch.tensor([[64], [32]])


def store_of(reads, bits=None, values=None):
    k, v = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    return Store(k, v, None, Middle(KEEP, values, bits=bits, reads=reads), Sizes(8, 32, 32))


@pytest.mark.parametrize("bits", [None, Packing(2), Packing(4, 64), Packing(8)])
def test_who_chooses_everything_reads_what_is_held(bits):
    store, labels = store_of(Labels(torch.arange(DIM).expand(HEADS, DIM) % 8 == 0, TOKENS), bits), 0.125
    held = measure_store(store_of(None, bits))
    ends = held.sink + held.window
    assert bytes_read(store_of(None, bits), 4) == ends + held.middle_k + held.middle_v
    assert bytes_read(store, 1) == ends + (1 + labels) * held.middle_k + held.middle_v
    pages = store_of(Quest(TOKENS, 16, 0), bits)
    bounds = 2 * 16 * (64 + 32) * 2  # 256 tokens of the middle in pages of 16, 2 bytes a number
    assert pages.reads.ranking.bounds.flat.nbytes == bounds
    assert bytes_read(pages, 3) == ends + 3 * (held.middle_k + held.middle_v) + bounds


@pytest.mark.parametrize("bits", [None, Packing(2)])
def test_every_query_head_reads_its_own(bits):
    """Six of 16 pages: for each of four query heads six sixteenths of the middle."""
    store = store_of(Quest(8 + 32 + 96, 16, 0), bits)
    held = measure_store(store_of(None, bits))
    chosen = 4 * 6 / 16 * (held.middle_k + held.middle_v)
    assert bytes_read(store, 4) == held.sink + held.window + chosen + store.reads.ranking.bounds.flat.nbytes


def test_pruned_values_are_counted():
    store = store_of(Quest(TOKENS, 16, 0), None, KEEP)
    held = measure_store(store)
    assert held.middle_v == 256 * int(KEEP.sum()) * 2
    bounds = store.reads.ranking.bounds.flat.nbytes
    assert bytes_read(store, 1) == held.sink + held.window + held.middle_k + held.middle_v + bounds


KERNELS = 4000


@pytest.mark.gpu
def test_a_graph_is_launched_as_fast_after_a_profile(monkeypatch):
    """With CUPTI left in the process, a launch takes the host 0.3 us per kernel and more; without it, tens in all."""
    monkeypatch.setenv(TEARDOWN, "1")
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x.add_(1)

    def launch():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        return time.perf_counter() - begin

    for _ in range(3):
        assert sum(launches.count for launches in profiled(graph.replay)) == KERNELS
        assert min(launch() for _ in range(10)) < 0.1e-6 * KERNELS


BENCH = ROOT / "scripts/bench"
PROGRAMS = {file.stem for file in BENCH.rglob("*.py") if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}


def test_the_index_has_every_program():
    named = re.findall(r"`([a-z_]+)[ `]", (BENCH / "README.md").read_text(encoding="utf-8"))
    assert {*named} >= PROGRAMS
