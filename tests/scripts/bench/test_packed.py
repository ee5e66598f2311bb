"""What scripts.bench.kernels.packed makes of its arguments, on a machine without a GPU."""

import pytest
import torch

from leank.eval.cache.storage.quantised import Packing
from scripts.bench.kernels import packed
from scripts.bench.pictures import read_table


@pytest.fixture
def calls(monkeypatch):
    """A GPU that is not there: what would have been compiled, checked and timed."""
    made = {"parallel": [], "bench": [], "failed": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(packed, "device_name", lambda: "no GPU")
    monkeypatch.setattr(packed, "in_parallel", lambda some: made["parallel"].extend(some) or made["failed"])
    monkeypatch.setattr(packed, "bench", lambda *given: made["bench"].append(given))
    return made


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        packed.main([str(tmp_path / "out"), "--bits", "8"])
    assert not (tmp_path / "out").exists()


def test_bits_choose_what_is_checked_and_timed(tmp_path, calls):
    packed.main([str(tmp_path), "--bits", "16", "8", "--batch", "1", "4"])
    assert calls["bench"] == [(tmp_path, [1, 4], [None, Packing(8)], False)]
    checks = [call for call in calls["parallel"] if call[0] is packed.check]
    assert checks == [(packed.check, Packing(8), group, queries) for group, queries in ((4, 1), (8, 1), (4, 5))]
    assert [call[1:] for call in calls["parallel"] if call[0] is packed.compile_one] == [
        (None, None),
        (Packing(8), None),
    ]


def test_every_packing_is_timed_by_default_and_none_where_they_are_only_checked(tmp_path, calls):
    packed.main([str(tmp_path)])
    assert calls["bench"][0][1:] == ([1, 16, 64], [None, Packing(8), Packing(4), Packing(2)], False)
    packed.main([str(tmp_path), "--check-only", "--bits", "4"])
    assert len(calls["bench"]) == 1


@pytest.mark.parametrize("arguments", [["--bits", "3"], ["--bits"], ["--bits", "x"], ["--batch", "1.5"]])
def test_bits_that_no_packing_has_are_refused(arguments, tmp_path, calls, capsys):
    with pytest.raises(SystemExit) as stopped:
        packed.main([str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
    assert not calls["parallel"]


def test_a_kernel_that_is_wrong_is_no_success(tmp_path, calls):
    calls["failed"] += [(packed.check, Packing(8), 4, 1), (packed.compile_one, None, None)]
    with pytest.raises(SystemExit, match="1 of 3 checks against float64 failed"):
        packed.main([str(tmp_path), "--bits", "8"])


def test_variants_have_the_default_first():
    pytest.importorskip("triton")
    assert packed.variants(None) == [None]
    tried = packed.variants(Packing(8))
    assert tried[0] is None
    assert len(set(tried)) == len(tried) > 1


def test_a_launch_that_fails_at_one_mask_has_no_mean(tmp_path, monkeypatch):
    """Its sum over fewer masks, divided by all, would look faster than it is."""
    pytest.importorskip("triton")
    monkeypatch.setattr(packed, "make_store", lambda *given: None)
    monkeypatch.setattr(packed, "needed_bytes", lambda store: 1000)
    monkeypatch.setattr(packed, "copies_of", lambda size: 1)
    at, default = [], len(packed.variants(Packing(8)))

    def kernel_us(shape, stores, kernel):
        at.append(kernel.config)
        if len(at) == default + 2:
            raise RuntimeError("does not fit")
        return 6.0

    monkeypatch.setattr(packed, "kernel_us", kernel_us)
    packed.bench(tmp_path, [1], [Packing(8)], True)
    rows = read_table(tmp_path / "packed.csv")
    assert {row["us"] for row in rows} == {"6.0"}
    assert {row["config"] for row in rows} == {str(one) if one else "" for one in set(at) - {at[default + 1]}}
