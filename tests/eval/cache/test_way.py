"""How much code a plain mask runs through, from `compressed_cache` to the kernel: no more than it was."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from leank import ChannelMask, compressed_cache
from tests import ROOT
from tests.conftest import tiny_model

pytest.importorskip("triton")

FILES, LINES = 25, 5350  # whole files, those of which a function ran


def test_a_plain_mask_reaches_the_kernel_through_few_files(monkeypatch):
    from leank.eval.cache.attention import launch

    monkeypatch.setattr(launch, "multiprocessors", lambda device: 2)
    model = copy.deepcopy(tiny_model("llama", head_dim=64, num_hidden_layers=1)).float()
    ran = set()

    def called(frame, event, argument):
        ran.add(frame.f_code.co_filename)

    def step(*ids):
        model(torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True)

    keep = torch.rand(model.config.num_hidden_layers, model.config.num_key_value_heads, 64) > 0.5
    before = sys.getprofile()
    sys.setprofile(called)
    try:
        with torch.no_grad():
            cache = compressed_cache(model, ChannelMask(keep), sink=2, window=8, flush=2, backend="triton")
            step(*(n % 8 for n in range(24)))
            for token in range(2):  # tokens leave the window
                step(token)
    finally:
        sys.setprofile(before)
    mine = {file for name in ran if (file := Path(name).resolve()).is_relative_to(ROOT) and file.is_file()}
    mine = {file for file in mine if not file.is_relative_to(ROOT / "tests")}
    assert len(mine) <= FILES, sorted(map(str, mine))
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in mine) <= LINES
    assert {"cache.py", "store.py", "launch.py", "decode.py"} <= {file.name for file in mine}
