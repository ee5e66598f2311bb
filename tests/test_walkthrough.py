"""The notebook runs from its first cell to its last."""

import copy

import nbformat
import pytest
from nbclient import NotebookClient

from tests import ROOT
from tests.helpers.tiny_run import save_model

NOTEBOOK = nbformat.read(ROOT / "docs/train/walkthrough.ipynb", as_version=4)
FEW = """
STEPS = {{"stage1": 2, "stage2": 1}}
SAMPLES, LENGTHS, TASKS = 1, (640, 680), ["niah_single_1"]
MODEL = {model!r}
"""


def cells(out, parameters=""):
    """The notebook with a cell of parameters that `parameters` follow; its results go to the folder `out`."""
    notebook = copy.deepcopy(NOTEBOOK)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source += f"\n{parameters}\nOUT = Path({str(out)!r})"
    return notebook


def test_it_is_stored_without_outputs():
    nbformat.validate(NOTEBOOK)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK.cells)


def test_its_cells_run_on_a_random_model(tmp_path, monkeypatch, capsys):
    """In this process: a kernel, and the reference model in it, take half a minute."""
    monkeypatch.chdir(ROOT)
    model = save_model(tmp_path / "model", max_position_embeddings=4096)
    names = {}
    for cell in cells(tmp_path, FEW.format(model=str(model))).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    said = capsys.readouterr().out
    assert "% of the K channels are pruned" in said
    assert said.count("IPython.core.display.Image") == 2
    assert (tmp_path / "mask.safetensors").exists()


@pytest.mark.slow
def test_the_notebook_runs_as_it_stands(tmp_path):
    notebook = cells(tmp_path)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for c in notebook.cells if c.cell_type == "code" for output in c.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output["text"] for output in outputs if "deprecated" in output.get("text", "")]
    assert "% of the K channels are pruned" in "".join(output.get("text", "") for output in outputs)
