"""Norm ratios of channels against the matrices of the paper's definition."""

import numpy as np
import pytest
import torch

from scripts.analyses.leank import staticity
from tests.helpers.analysis_source import DIM, GROUP, HEADS, LENGTH, only, qkv, source

TASKS = ("niah_single_2", "niah_multikey_1")


def ratios(found, ids, queries):
    """r_i = ||Q_[i] K_[i]^T|| / ||Q K^T|| of appendix A, from whole matrices; over the queries of a group."""
    layers = []
    for q, k, _ in qkv(ids):
        q = q[:, -queries:].reshape(HEADS, GROUP * queries, DIM)
        k = k[::GROUP]
        whole = torch.linalg.matrix_norm(q @ k.mT)
        each = [torch.linalg.matrix_norm(q[..., [i]] @ k[..., [i]].mT) / whole for i in range(DIM)]
        layers.append(torch.stack(each, -1))
    return torch.stack(layers)


def test_correlations_are_those_of_the_whole_matrices():
    found = source()
    rows = staticity(found, TASKS, LENGTH, (LENGTH, LENGTH + 80), TASKS[0], samples=2, queries=16, ratio=0.5)
    cells = [*((task, LENGTH) for task in TASKS), (TASKS[0], LENGTH + 80)]
    mean = {
        cell: torch.stack([ratios(found, found.ids(found.sample(*cell, index)), 16) for index in range(2)]).mean(0)
        for cell in cells
    }
    assert len(rows) == 2 * (2 * 2 + 2 * 2)
    for one in only(rows):
        a, b = (mean[one[task], one[n]] for task, n in (("task", "length"), ("other_task", "other_length")))
        if one["measure"] == "pearson":
            assert one["value"] == pytest.approx(np.corrcoef(a.flatten(), b.flatten())[0, 1], abs=1e-6)
        else:
            kept = [set(map(tuple, np.argwhere((x >= x.sort(-1).values[..., [DIM // 2]]).numpy()))) for x in (a, b)]
            assert one["value"] == pytest.approx(len(kept[0] & kept[1]) / len(kept[0]))
    same = [
        one
        for one in only(rows, measure="pearson")
        if one["task"] == one["other_task"] and one["length"] == one["other_length"]
    ]
    assert [one["value"] for one in same] == pytest.approx([1.0] * 4)
