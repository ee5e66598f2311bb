"""The notebook runs from its first cell to its last."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests import ROOT

NOTEBOOK = ROOT / "docs" / "walkthrough.ipynb"
FEW = """
STEPS = {"stage1": 2, "stage2": 1}
SAMPLES, LENGTHS, TASKS = 1, (640, 680), ["niah_single_1"]
"""


def run(folder, parameters):
    """The executed notebook's printed text; parameters: source that follows the cell of parameters."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source += f"\n{parameters}\nOUT = Path({str(folder)!r})"
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for c in notebook.cells if c.cell_type == "code" for output in c.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output["text"] for output in outputs if "deprecated" in output.get("text", "")]
    return "".join(output.get("text", "") for output in outputs)


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_the_notebook_runs_with_a_few_steps(tmp_path):
    text = run(tmp_path, FEW)
    assert "% of the K channels are pruned" in text
    assert (tmp_path / "mask.safetensors").exists()


@pytest.mark.slow
def test_the_notebook_runs_as_it_stands(tmp_path):
    assert "% of the K channels are pruned" in run(tmp_path, "")
