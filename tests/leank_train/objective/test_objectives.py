"""An objective is one file: its class is found in the folder, and both stages take its name."""

import torch

import leank_train.objective
from leank_train.objective import base
from leank_train.objective.base import objectives

OF_MINE = """
from leank_train.objective.base import Objective, objective

@objective("mine")
class Mine(Objective):
    def distance(self, full, scaled, lengths):
        return (full - scaled).abs().mean()
"""


def test_a_file_of_the_folder_is_an_objective(tmp_path, monkeypatch):
    assert {"l2", "kl"} <= {*objectives()}
    (tmp_path / "mine.py").write_text(OF_MINE)
    monkeypatch.setattr(leank_train.objective, "__path__", [*leank_train.objective.__path__, str(tmp_path)])
    monkeypatch.setattr(base, "KNOWN", dict(base.KNOWN))
    found = objectives()["mine"](None, "official").distance(torch.ones(1, 2, 3), torch.zeros(1, 2, 3), None)
    assert found.item() == 1
