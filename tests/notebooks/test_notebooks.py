"""Every notebook runs, and shows the output of such a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

_NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    written = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert any(written), "commit it with its output"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert [len(output) for output in outputs] == [len(output) for output in written]
