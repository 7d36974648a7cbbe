"""What a public host runs is what a developer runs: targets of the Makefile, on each Python that is supported."""

import re
from importlib.metadata import metadata
from pathlib import Path

import yaml

from tests.documents.blocks import blocks_of
from tests.packaging.readme_example import example

_ROOT = Path(__file__).parents[2]
_JOBS = yaml.safe_load((_ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
_MAKEFILES = "".join((_ROOT / file).read_text() for file in ("Makefile", "tests/lab/Makefile"))


def test_the_workflow_runs_targets_that_exist():
    commands = [step["run"] for job in _JOBS.values() for step in job["steps"] if "run" in step]
    scripts = [script for command in commands for script in re.findall(r"\.ci/\w+", command)]
    assert {*scripts} == {f".ci/{path.name}" for path in (_ROOT / ".ci").iterdir()}
    texts = [*commands, *((_ROOT / script).read_text() for script in scripts)]
    targets = [target for text in texts for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)]
    assert {"ci", "release-check", "test-prereleases"} <= {*targets}
    assert [target for target in targets if not re.search(rf"^{target}:", _MAKEFILES, re.MULTILINE)] == []


def test_the_workflow_runs_each_python_that_is_supported():
    classifiers = metadata("lightning-tricks").get_all("Classifier")
    supported = [text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text]
    assert _JOBS["test"]["strategy"]["matrix"]["python"] == supported


def test_hooks_before_a_commit_are_commands_of_make_check():
    config = yaml.safe_load((_ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    commands = {entry.removeprefix(".venv/bin/").replace(" --force-exclude", "") for entry in entries}
    check = re.search(r"^check:.*\n((?:\t.*\n)+)", _MAKEFILES, re.MULTILINE)[1]
    known = re.findall(r"^\t\$\(BIN\)/(.*)", check, re.MULTILINE)
    # a hook gets the names of files in place of a folder, and formats
    known = {re.sub(r"( --check)?( \.| lightning_tricks)?$", "", command) for command in known}
    assert commands <= known


def test_the_example_that_is_checked_before_a_release_is_the_readmes_first():
    program, output = example()
    first = blocks_of(_ROOT / "README.md", language="python")[0]
    assert (program, output) == (first.code, first.output)
