"""All cases, collected from the rooms' own `contract.py`."""

from importlib import import_module
from pathlib import Path

from tests.contract.case import Case


def _collect() -> dict[str, Case]:
    files = sorted(Path(__file__).parent.parent.glob("*/contract.py"))
    cases = [case for file in files for case in import_module(f"tests.{file.parent.name}.contract").CASES]
    return {case.callback.__name__: case for case in cases}


CASES = _collect()
