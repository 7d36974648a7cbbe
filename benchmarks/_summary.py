"""Gather what the benchmarks wrote into `benchmarks/results.json`, and into the tables of `docs/benchmarks.md`.

A benchmark that was not run again keeps its figures, and the versions that they were measured with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _figures import columns_of, shown

HERE = Path(__file__).parent
ON_GPU = HERE.parent / "tests" / "gpu" / "result.json"  # of `make gpu`
SUMMARY, PAGE = HERE / "results.json", HERE.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

What the scripts under `benchmarks/` measured, written by `make bench`: contestant and peer run alternately in one
process. A ratio is the median over the rounds of what the contestant takes over what the peer takes, unless the case
says otherwise: below 1, the contestant takes less. The spread is the range between the quartiles. Figures of models are
means over seeds with 95 % intervals, and those of `A - B` the differences in the same seeds. Counts of kills are those
after which the program, started again, ends as if it had not been killed.
"""


def gather() -> dict[str, Any]:
    """Return the results of all benchmarks by claim and device; those of this run replace older ones."""
    found: dict[str, Any] = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    if ON_GPU.exists():
        results += json.loads(ON_GPU.read_text())["benchmarks"].values()
    for result in results:
        if any(kind in result for kind in TABLES):
            device, claim = result["environment"]["device"], result.pop("claim")
            found[claim if device == "CPU" else f"{claim} on {device}"] = result
    return dict(sorted(found.items()))


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page: a section for each script."""
    yield HEAD
    for claim, result in results.items():
        where = result["environment"]
        threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)}"
        yield f"## {claim}\n"
        kind, (unit, table) = next(each for each in TABLES.items() if each[0] in result)
        yield f"{where['device']}, {threads}, {result['rounds']} {unit}; {_versions(where)}.\n"
        yield from table(result[kind])
        yield ""


def _ratios(cases: Mapping[str, Any]) -> Iterator[str]:
    yield "| case | contestant | peer | ratio | spread |"
    yield "| --- | --- | --- | ---: | --- |"
    for case, contestants in cases.items():
        for name, ratio in contestants.items():
            spread = f"{ratio['q1']:.3g} to {ratio['q3']:.3g}" if ratio["q1"] != ratio["q3"] else "counted"
            yield f"| {case} | {name} | {ratio.get('peer', '')} | {ratio['median']:.3g} | {spread} |"


def _figures(rows: Mapping[str, Any]) -> Iterator[str]:
    columns = columns_of(rows)
    yield f"| | {' | '.join(columns)} |"
    yield f"| --- |{' :-: |' * len(columns)}"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(shown(row[column]) if column in row else '' for column in columns)} |"


def _counts(rows: Mapping[str, Any]) -> Iterator[str]:
    columns = columns_of(rows)
    yield f"| | {' | '.join(columns)} |"
    yield f"| --- |{' ---: |' * len(columns)}"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(str(row.get(column, '')) for column in columns)} |"


# What a benchmark found -> what its rounds are, and its table
TABLES = {
    "ratios": ("rounds", _ratios),
    "figures": ("seeds", _figures),
    "counts": ("kills", _counts),
    "healthy runs": ("batches", _counts),
}


def _versions(where: Mapping[str, Any]) -> str:
    return f"Python {where['python']}, torch {where['torch']}, Lightning {where['lightning']}, {where['cores']} cores"


def main() -> None:
    """Write both files."""
    results = gather()
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text("\n".join(page(results)) + "\n")


if __name__ == "__main__":
    main()
