"""Every notebook runs, and shows the output of such a run.

Each runs in a fork of this process, which has imported what they all need: a kernel would import it anew. `SMALLER`
shortens what takes long; `make thorough` runs them as they are.
"""

import io
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

import lightning.pytorch  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import nbformat
import pytest
import sklearn.datasets  # noqa: F401
import torchvision  # noqa: F401
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from tests.contract.processes import append_output_to, run_and_exit

# Before Python 3.11 errors carry no notes, and what would be one is logged
_STREAMS = ("stdout", "stderr") if sys.version_info >= (3, 11) else ("stdout",)
_NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

# What is written in a notebook, and what takes its place where it is not run in full; what it prints stays the same
SMALLER = {
    "00_quickstart": {"epochs=6": "epochs=3", "epochs=2": "epochs=1"},
    "fine_tuning": {
        "epochs=15": "epochs=4",
        "epochs=20": "epochs=4",
        "range(1, 21)": "range(1, 5)",
        "EPOCHS = 30": "EPOCHS = 6",
        "8: f": "2: f",
        '16: "*"': '4: "*"',
    },
    "idle_gpus_and_slow_loaders": {"[:512]": "[:192]", "range(512)": "range(192)"},
    "killed_and_compared": {"max_epochs=3": "max_epochs=2"},
    "model_cost": {
        "max_steps=140": "max_steps=20",
        "(1, 200), (4, 200), (16, 100)": "(1, 20), (4, 20), (16, 20)",
        "range(20)": "range(3)",
    },
    "stable_training": {"pixels.float()": "pixels.float()[:, 16:48]"},  # half of the pixels, half of the recurrence
    "trusting_predictions": {"max_epochs=40": "max_epochs=10"},
    "several_models": {
        "epochs=20": "epochs=4",
        "**adam), 10)": "**adam), 2)",
        "**adam), 25)": "**adam), 10)",
        "epochs=4": "epochs=1",
        "for _ in range(2)": "for _ in range(1)",
    },
}


class _SilentHook(DisplayHook):
    """Formats the value of a cell's last line, and shows it to nobody."""

    def write_output_prompt(self):
        pass

    def write_format_data(self, format_dict, md_dict=None):
        pass


class ZMQInteractiveShell(InteractiveShell):
    """A shell that keeps what cells display; by its name, libraries know that they run in a notebook."""

    display_pub_class = Type(CapturingDisplayPublisher)
    displayhook_class = Type(_SilentHook)

    def enable_gui(self, gui=None):
        """Nothing to enable: figures are displayed inline."""


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, request):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells), "commit it with its output"
    sources = [cell.source for cell in cells]
    if not request.config.getoption("thorough"):
        sources = _smaller(sources, SMALLER.get(path.stem, {}))
    pid = os.fork()
    if pid == 0:
        append_output_to(tmp_path / "output.txt")
        run_and_exit(lambda: _run(sources, tmp_path / "printed.json"))
    assert os.waitpid(pid, 0)[1] == 0, (tmp_path / "output.txt").read_text()
    printed = json.loads((tmp_path / "printed.json").read_text())
    written = [{name: _text(cell, name) for name in ("stdout", "stderr")} for cell in cells]
    assert _words(printed) == _words(written), "numbers aside, it shows what it prints"


def _smaller(sources, replacements):
    for written, instead in replacements.items():
        assert any(written in source for source in sources), f"{written!r} is not in the notebook any more"
        sources = [source.replace(written, instead) for source in sources]
    return sources


def _run(sources, file):
    """Run the cells in the working directory as a kernel does, and write what each of them prints."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, where the tests' packages bring it
    os.environ |= {
        "IPYTHONDIR": str(file.parent / "ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    sys.path.insert(0, "")
    shell = ZMQInteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    printed = []
    for source in sources:
        streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        for logger in ("lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(logger).handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(streams["stderr"])
        outside = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = streams.values()
        try:
            result = shell.run_cell(source)
        finally:
            sys.stdout, sys.stderr = outside
        texts = {name: stream.getvalue() for name, stream in streams.items()}
        for stream, text in zip(outside, texts.values(), strict=True):
            stream.write(text)  # for the message of a failure
        result.raise_error()
        printed.append(texts)
    file.write_text(json.dumps(printed))


def _text(cell, stream):
    return "".join(output["text"] for output in cell.outputs if output.get("name") == stream)


def _words(cells):
    return [re.sub(r"[\d.]+(e[+-]\d+)?", "#", "".join(cell[stream] for stream in _STREAMS)) for cell in cells]
