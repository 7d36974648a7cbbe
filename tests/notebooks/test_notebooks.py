"""Every notebook runs, and shows the output of such a run."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

# Before Python 3.11 errors carry no notes, and what would be one is logged
_STREAMS = ("stdout", "stderr") if sys.version_info >= (3, 11) else ("stdout",)
_NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's, where the tests' packages bring it
    notebook = nbformat.read(path, as_version=4)
    written = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert any(written), "commit it with its output"
    client = NotebookClient(
        notebook, timeout=300, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert _words(printed) == _words(written), "numbers aside, it shows what it prints"


def _words(outputs):
    texts = ("".join(output["text"] for output in cell if output.get("name") in _STREAMS) for cell in outputs)
    return [re.sub(r"[\d.]+", "#", text) for text in texts]
