"""README.md says what is true: its code runs and prints what it says, its commands exist, its tables are up to date."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_tricks import Tricks
from lightning_tricks.cli import main
from tests.contract.readme_tables import README, rewritten
from tests.mixin.test_mixin import LitNet

_TEXT = README.read_text()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_BLOCKS = [match.groups() for match in _BLOCK.finditer(_TEXT) if match[1] != "text"]


def _of(language):
    blocks = [(code, output) for name, code, output in _BLOCKS if name == language]
    assert blocks, f"README.md has no {language} block"
    return blocks


_RUN_EACH = """
import json, os, sys, traceback
import lightning.pytorch  # once for all
for code, folder in json.loads(sys.argv.pop()):
    if os.fork() == 0:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    with open(os.path.join(folder, "status"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Code -> the folder with what it printed; each block in a process of its own, which has imported Lightning."""
    folders = {code: tmp_path_factory.mktemp("block") for code, _ in _of("python")}
    blocks = json.dumps([(code, str(folder)) for code, folder in folders.items()])
    subprocess.run([sys.executable, "-W", "ignore", "-c", _RUN_EACH, blocks], check=True)
    return folders


@pytest.mark.parametrize(("code", "output"), _of("python"))
def test_python_block_prints_what_it_says(code, output, runs):
    folder = runs[code]
    assert (folder / "status").read_text() == "0", (folder / "error").read_text()
    # the progress bar goes to standard output, too: the example's own lines come last
    assert (folder / "output").read_text().rstrip().endswith((output or "").rstrip())


def test_first_example_fits_on_the_first_screen():
    assert len(_of("python")[0][0].splitlines()) <= 15


@pytest.mark.parametrize("command", [line for code, _ in _of("console") for line in code.splitlines()])
def test_command_exists(command):
    program, *arguments = command.removeprefix("$ ").split()
    if program == "make":
        makefile = (README.parent / "Makefile").read_text()
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE)
    else:
        assert program == "lightning-tricks"
        with pytest.raises(SystemExit) as stopped:
            main([arguments[0], "--help"])
        assert stopped.value.code == 0


@pytest.mark.parametrize(("config", "output"), _of("yaml"))
def test_yaml_block_builds(config, output, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text(config)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "config.yaml"])
    cli = LightningCLI(LitNet, run=False, save_config_callback=None, seed_everything_default=False)
    assert cli.model.tricks.as_dict() == Tricks(**yaml.safe_load(config)["model"]["tricks"]).as_dict()


def test_tables_are_up_to_date():
    assert rewritten(_TEXT) == _TEXT, "run `make fix`"


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", _TEXT))
def test_links_lead_somewhere(link):
    assert (Path(README.parent) / link).exists()
