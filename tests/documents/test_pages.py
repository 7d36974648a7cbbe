"""README.md and the pages of docs/ say what is true: their code runs and prints what they say, their commands exist."""

import argparse
import ast
import re
import sys
from collections import Counter
from importlib.metadata import metadata
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import lightning_tricks
from lightning_tricks import Tricks, cli
from lightning_tricks.training_cli import TricksCLI
from tests.documents.blocks import LANGUAGES, PAGES, README, blocks_of, our_arguments, run_each
from tests.documents.generated import DOCS, pages
from tests.mixin.test_mixin import LitNet

_PYTHON = blocks_of(*PAGES, language="python")
_COMMANDS = [command for block in blocks_of(*PAGES, language="console") for command in block.commands]
_TRAINING = ("fit", "validate", "test", "predict")
_OTHERS = {"cd", "fuser", "git", "kill", "lsof", "make", "nvidia-smi", "pip", "plink", "ps", "python", "ssh"}
_OTHERS |= {"systemctl", "tail", "tensorboard", "tmux"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_each([block.code for block in _PYTHON], tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("block", _PYTHON, ids=str)
def test_python_block_prints_what_it_says(block, runs):
    folder = runs[block.code]
    assert (folder / "status").read_text() == "0", (folder / "error").read_text()
    # the progress bar goes to standard output, too: the example's own lines come last
    assert (folder / "output").read_text().rstrip().endswith((block.output or "").rstrip())


def test_every_block_is_found():
    for page in PAGES:
        blocks = blocks_of(page)
        text = re.sub(r"^```text\n.*?^```\n", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(blocks) == text.count("```") / 2, page
        assert {block.language for block in blocks} <= LANGUAGES, page


def test_readme_counts_the_callbacks_that_refuse_a_setting():
    table = (README.parent / "docs" / "support.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in table.partition("Refuses |")[2].partition("\n\n")[0].splitlines()[2:]]
    refusals = Counter(name for row in rows for name in re.findall(r"`\w+`", row[3]))
    assert refusals == {"`Microbatching`": 2}
    text = "; `Microbatching`\nrefuses two of them with"
    assert text in README.read_text(encoding="utf-8")


def _texts_of_the_package():
    """Yield what the package's code says, without docstrings; a zero stands for what a text is filled in with."""
    for file in Path(lightning_tricks.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in docstrings:
                yield "".join(
                    str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "\0" for part in parts
                )


def test_messages_of_the_page_are_those_of_the_package():
    page = (README.parent / "docs" / "messages.md").read_text(encoding="utf-8")
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    said = "\n".join(_texts_of_the_package())
    missing = [text for text in messages if not re.search(r"[^\n]*".join(map(re.escape, text.split("..."))), said)]
    assert len(messages) > 50
    assert not missing, "no code says this any more"


def test_readme_names_every_extra():
    extras = metadata("lightning-tricks").get_all("Provides-Extra")
    named = README.read_text(encoding="utf-8").rpartition("Extras, as in\n")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", named)} == {*extras} - {"test", "test-ray", "mutants", "coverage"}


@pytest.mark.parametrize("command", dict.fromkeys(_COMMANDS))
def test_command_exists(command, capsys):
    if command.startswith("make "):
        makefile = "".join((README.parent / file).read_text() for file in ("Makefile", "tests/lab/Makefile"))
        assert all(
            re.search(rf"^{target}:", makefile, re.MULTILINE) for target in command.split()[1:] if "=" not in target
        )
        return
    ours = list(our_arguments(command))
    assert ours or command.removeprefix("sudo ").split()[0] in _OTHERS
    for arguments in ours:
        if arguments[0] in _TRAINING:
            with pytest.raises(SystemExit) as stopped:
                cli.main([arguments[0], "--help"])
            assert stopped.value.code == 0
            continue
        ran = []
        parse = argparse.ArgumentParser.parse_args

        def keep(parser, argv, parse=parse, ran=ran):
            parsed = parse(parser, argv)
            ran.append(parsed.run)
            parsed.run = lambda arguments: 0
            return parsed

        with patch.object(argparse.ArgumentParser, "parse_args", keep):
            assert cli.main(arguments) == 0
        assert ran


@pytest.mark.parametrize("block", blocks_of(*PAGES, language="yaml"), ids=str)
def test_yaml_block_builds(block, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text(block.code)
    monkeypatch.setattr(sys, "argv", ["lightning-tricks", "--config", "config.yaml"])
    config = yaml.safe_load(block.code)
    model = config.get("model", {})
    built = TricksCLI(None if "class_path" in model else LitNet, run=False, save_config_callback=None)
    if "tricks" in model:
        assert built.model.tricks.as_dict() == Tricks(**model["tricks"]).as_dict()
    given = config.get("trainer", {}).get("callbacks", [])
    paths = [callback if isinstance(callback, str) else callback["class_path"] for callback in given]
    names = {type(callback).__name__ for callback in built.trainer.callbacks}
    assert {path.rpartition(".")[2] for path in paths} <= names


def test_generated_pages_are_up_to_date():
    wanted = pages()
    assert {path: path.read_text() for path in wanted} == wanted, "run `make fix`"
    assert {path for path in wanted if path.parent != DOCS} == {*(DOCS / "reference").iterdir()}


def _anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    documented = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings} | {*documented}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link
