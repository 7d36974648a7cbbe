"""The shape of the house: cheap imports, honest exports, and import rules that a broken package does not pass."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import pytest

import lightning_tricks

_PACKAGE = Path(lightning_tricks.__file__).parent
_ROOMS = [module.name for module in pkgutil.iter_modules([str(_PACKAGE)]) if module.ispkg and module.name[0] != "_"]
_HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy", "rich", "sklearn")


def _loaded_by(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(output.split())


def test_importing_the_package_and_its_rooms_loads_nothing():
    loaded = _loaded_by("; ".join(f"import lightning_tricks.{room}" for room in _ROOMS))
    assert not loaded & set(_HEAVY)


@pytest.fixture(scope="module")
def loaded_by_cores():
    """Room -> the modules of its core, and what is loaded when they are; each in a fork of one process with torch."""
    cores = {}
    for room in _ROOMS:
        core = [_PACKAGE / room / "functional.py", *(_PACKAGE / room / "core").rglob("*.py")]
        names = [".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts) for path in core if path.exists()]
        cores[room] = [name.removesuffix(".__init__") for name in names]
    run = subprocess.run([sys.executable, "-c", _LOADS, json.dumps(cores)], capture_output=True, text=True, check=True)
    loaded = {room: set(modules) for room, modules in map(json.loads, run.stdout.splitlines())}
    return {room: (names, loaded[room]) for room, names in cores.items()}


_LOADS = """
import importlib, json, os, sys
import torch
assert not {"lightning", "pytorch_lightning", "lightning_tricks"} & {*sys.modules}
for room, names in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        for name in names:
            importlib.import_module(name)
        print(json.dumps([room, [*sys.modules]]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("room", _ROOMS)
def test_the_core_loads_no_lightning(room, loaded_by_cores):
    names, loaded = loaded_by_cores[room]
    assert names
    assert set(names) <= loaded
    assert not loaded & {"lightning", "lightning_fabric", "pytorch_lightning"}


@pytest.mark.parametrize("name", ["lightning_tricks", *(f"lightning_tricks.{room}" for room in _ROOMS)])
def test_public_names_are_there_and_typed(name):
    package = importlib.import_module(name)
    assert package.__doc__
    assert dir(package) == package.__all__
    for public in package.__all__:
        assert inspect.getdoc(getattr(package, public)), f"{public} has no docstring"
        assert public not in _ROOMS, "a lazy import would return the package"
    for node in ast.parse(Path(package.__file__).read_text()).body:
        if isinstance(node, ast.If):  # if TYPE_CHECKING
            aliases = [
                alias for statement in node.body if isinstance(statement, ast.ImportFrom) for alias in statement.names
            ]
            for told in (ast.literal_eval(s.value) for s in node.body if isinstance(s, ast.Assign)):
                assert sorted(told) == package.__all__, "what `import *` gives to type checkers"
            assert sorted(alias.name for alias in aliases) == package.__all__
            assert all(alias.name == alias.asname for alias in aliases), "`import x as x` re-exports"
    with pytest.raises(AttributeError, match=f"{name}.* has no attribute 'nothing'; it has "):
        package.nothing  # noqa: B018


def test_the_version_is_that_of_the_project(capsys, monkeypatch):
    stated = re.search(r'^version = "(.+)"$', (_PACKAGE.parent / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert lightning_tricks.__version__ == stated
    monkeypatch.setattr(sys, "argv", ["python -m lightning_tricks", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lightning_tricks", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-tricks {stated}\n"


def test_a_source_that_is_not_installed_has_no_version(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert runpy.run_path(str(_PACKAGE / "_version.py"))["__version__"] == "0+unknown"


@pytest.mark.parametrize("room", _ROOMS)
def test_every_room_has_its_tests(room):
    expected = {"contract.py", "test_callback.py"} if (_PACKAGE / room / "callback.py").exists() else set()
    files = {path.name for path in (Path(__file__).parents[1] / room).iterdir()}
    assert expected <= files
    assert any(name.startswith("test_") for name in files - expected), "the core has tests of its own"


@pytest.mark.parametrize("room", _ROOMS)
def test_the_only_folder_of_a_room_is_its_core(room):
    folders = {path.relative_to(_PACKAGE / room).parts[0] for path in (_PACKAGE / room).glob("*/**/*.py")}
    assert folders <= {"core"}, "the import rule is about this folder"


def _lint_imports(root):
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def house(tmp_path):
    """A copy of the package, to be broken."""
    shutil.copytree(_PACKAGE, tmp_path / "lightning_tricks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_PACKAGE.parent / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_rules_are_kept(house):
    run = _lint_imports(house)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("new_room/functional.py", "import lightning"),
        ("new_room/callback.py", "import lightning_tricks.seeding.functional"),
        ("seeding/functional.py", "import lightning.pytorch"),
        ("seeding/functional.py", "import lightning_tricks.seeding.callback"),
        ("seeding/callback.py", "import lightning_tricks.gradient_clipping.callback"),
        ("seeding/callback.py", "import lightning_tricks.gradient_clipping.core.clipping"),
        ("gradient_clipping/callback.py", "import lightning_tricks.mixin"),
        ("gradient_clipping/callback.py", "import lightning_tricks.demo"),
        ("gradient_clipping/core/methods.py", "import lightning"),
        ("_callback.py", "import lightning_tricks.seeding.functional"),
        ("_shared/checks.py", "import lightning_tricks.seeding.functional"),
        ("mixin.py", "import lightning_tricks.cli"),
    ],
)
def test_a_broken_import_rule_is_caught(house, file, statement):
    path = house / "lightning_tricks" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.relative_to(house).parents[:-1]:
        (house / folder / "__init__.py").touch()
    with path.open("a") as source:
        source.write(f"\n{statement}\n")
    run = _lint_imports(house)
    assert run.returncode == 1
    assert "BROKEN" in run.stdout


def test_make_test_runs_each_folder_of_tests_once():
    root = Path(__file__).parents[2]
    variables = dict(re.findall(r"^([\w-]+) := (.+)$", (root / "Makefile").read_text(), re.MULTILINE))
    patterns = [pattern for part in variables["PARTS"].split() for pattern in variables[part].split()]
    for folder in {path.parent for path in (root / "tests").glob("*/test_*.py")}:
        name = folder.relative_to(root).as_posix()
        assert sum(fnmatchcase(name, pattern) for pattern in patterns) == 1, name
