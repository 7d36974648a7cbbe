"""Figures in the docs are those that the benchmarks wrote into `benchmarks/results.json`."""

import json
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "Accuracy, %": "accuracy, %",
    "NLL": "NLL",
    "ECE": "ECE",
    "Coverage of sets, %": "coverage, %",
    "Classes in a set": "classes in a set",
    "AUROC": "AUROC, entropy",
}


def test_calibration_page_has_the_figures_of_trusting_predictions():
    figures = json.loads((ROOT / "benchmarks/results.json").read_text())["trusting_predictions"]["figures"]
    compared = 0
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/tricks/calibration.md").read_text("utf-8"), re.MULTILINE):
        (_, *columns), _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for name, *cells in rows:
            found = figures.get(name.replace("`", ""))
            if found is None or not set(columns) <= COLUMNS.keys():
                continue
            for column, cell in zip(columns, cells, strict=True):
                for shown, value in zip(re.findall(r"-?[\d.]+", cell), found[COLUMNS[column]].values(), strict=False):
                    decimals = len(shown.partition(".")[2])
                    assert float(shown) == round(value, decimals), f"{name}, {column}: {shown} for {value}"
                    compared += 1
    assert compared == 8 * 6 + 5 * 4 * 3


def test_benchmarks_page_shows_a_claim_of_each_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    summary = import_module("_summary")
    results = json.loads(summary.SUMMARY.read_text("utf-8"))
    assert summary.PAGE.read_text("utf-8") == "\n".join(summary.page(results)) + "\n", "run `benchmarks/_summary.py`"
    assert {claim.script for claim in summary.CLAIMS} == {name.partition(" on ")[0] for name in results}
