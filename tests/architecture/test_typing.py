"""What a type checker sees of the package: every documented form passes, and a misspelled name does not."""

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_tricks
from lightning_tricks._lazy import packages_with
from tests.documents.blocks import PAGES, blocks_of
from tests.small import PUBLIC

_PACKAGE = Path(lightning_tricks.__file__).parent

# What it says of other packages takes minutes and is not ours to test: they count as untyped.
_CONFIG = """
[mypy]
check_untyped_defs = true
no_implicit_reexport = true
[mypy-torch.*,lightning.*,torchmetrics.*,transformers.*,numpy.*,rich.*,safetensors.*,PIL.*]
follow_imports = skip
[mypy-sklearn.*,torchvision.*,matplotlib.*,packaging.*,yaml.*,torchinfo.*,torchviz.*,graphviz.*,thop.*,torchensemble.*,timm.*,fsspec.*]
follow_imports = skip
ignore_missing_imports = true
"""

_FORMS = """
import torch
import lightning_tricks
from lightning_tricks import *
from lightning_tricks import OptimizerSpec, ScheduleSpec, Tricks, TricksMixin, count_flops
from lightning_tricks.metrics import binary_metrics
from lightning_tricks.lr_schedules import build_optimizer

version: str = lightning_tricks.__version__
by_star: SeedEverything = SeedEverything(42)

Tricks(optimizer={"name": "SGD", "lr": 0.1}, flops_report=True, metrics_monitor={"metrics": {"task": "binary"}})
Tricks(optimizer=OptimizerSpec("AdamW"), schedule=ScheduleSpec("wsd", warmup="500 steps", decay=0.1))
Tricks(optimizer=True, schedule={"kind": "wsd", "warmup": "500 steps"}, metrics_monitor=binary_metrics())
Tricks(seed_everything=42, gradient_clipping=0.5, auto_resume="runs", run_fingerprint="a.csv", image_logger=16)
Tricks(gradient_clipping={"method": {"class_path": "lightning_tricks.gradient_clipping.AGC"}}, seed_everything=None)
Tricks(checkpoint_remapping=True, model_report="out", seed_everything=False)
count_flops(torch.nn.Linear(2, 2), torch.zeros(1, 2)).flops
"""

_MISTAKES = {
    "from lightning_tricks import SeedEverythin": 'no attribute "SeedEverythin"',
    "from lightning_tricks import lazy_names": 'no attribute "lazy_names"',
    "import lightning_tricks; lightning_tricks.count_flop": 'no attribute "count_flop"',
    "from lightning_tricks import *; SeedEverythin": 'Name "SeedEverythin" is not defined',
    **{
        f"from lightning_tricks.{room.parent.name} import Nothing": 'no attribute "Nothing"'
        for room in sorted(_PACKAGE.glob("[a-z]*/__init__.py"))
    },
    "from lightning_tricks import Tricks; Tricks(gradient_cliping=1.0)": 'argument "gradient_cliping"',
    "from lightning_tricks import Tricks; Tricks(seed_everything='1')": '"seed_everything" to "Tricks" has incompat',
    "from lightning_tricks import OptimizerSpec; OptimizerSpec(nme='SGD')": 'keyword argument "nme"',
    "from lightning_tricks import ScheduleSpec; ScheduleSpec(knd='wsd')": 'keyword argument "knd"',
    "from lightning_tricks import GradientClipping; GradientClipping(max_nrm=1.0)": 'keyword argument "max_nrm"',
}


def _examples():
    """The examples of all docstrings in the package, each after the imports of its module, by the object's name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    public = PUBLIC | {name: getattr(lightning_tricks, name) for name in lightning_tricks.__all__}
    for name, kind in public.items():
        module = inspect.getmodule(kind)
        source = ast.parse(inspect.getsource(module))
        imports = [ast.unparse(node) for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for test in finder.find(kind, name, module=module):
            code = "".join(example.source for example in test.examples)
            nodes = list(ast.walk(ast.parse(code)))
            imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
            used = {node.id for node in nodes if isinstance(node, ast.Name)} & {*public} - imported
            homes = [f"from {packages_with(each)[0]} import {each}" for each in {name, *used} & {*PUBLIC}]
            if code:
                yield name, "\n".join([*imports, *homes, code])


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """File -> what mypy says of it; one run, in which the package is an installed one."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "mypy.ini").write_text(_CONFIG)
    files = {"forms": _FORMS}
    files |= {f"page_{i}": block.code for i, block in enumerate(blocks_of(*PAGES, language="python"))}
    files |= {f"docstring_{name}": code for name, code in _examples()}
    files |= {f"mistake_{i}": code for i, code in enumerate(_MISTAKES)}
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    cache = os.environ.get("MYPY_CACHE_DIR", _PACKAGE.parent / ".mypy_cache" / "typing")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", cache, *folder.glob("*.py")]
    environment = {**os.environ, "PYTHONPATH": str(_PACKAGE.parent)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not run.stderr, run.stderr
    said = dict.fromkeys(files, "")
    for line in run.stdout.splitlines():
        if match := re.match(r"(\w+)\.py:\d+: error", line):
            said[match[1]] += f"{line}\n"
    return said


def test_documented_forms_pass(complaints):
    assert sum(name.startswith("docstring") for name in complaints) > 25
    found = "".join(said for name, said in complaints.items() if not name.startswith("mistake"))
    assert not found, found


@pytest.mark.parametrize("number", range(len(_MISTAKES)), ids=list(_MISTAKES))
def test_a_mistake_is_found(complaints, number):
    assert list(_MISTAKES.values())[number] in complaints[f"mistake_{number}"]
