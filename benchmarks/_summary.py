"""Gather the results of the benchmarks into `benchmarks/results.json`, and write `docs/benchmarks.md` by `_claims.py`.

A benchmark that was not run again keeps its figures, and the versions that they were measured with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _claims import CLAIMS, Claim
from _figures import shown

HERE = Path(__file__).parent
ON_GPU = HERE.parent / "tests" / "gpu" / "result.json"  # of `make gpu`
SUMMARY, PAGE = HERE / "results.json", HERE.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Figures are ratios unless they say otherwise: the median of the time that the first takes over the time that the second
takes, with the quartiles. Below 1, the first is faster. Both run alternately in one process. If no second is named, it
is the same program without this package. Differences are means over seeds, with 95 % intervals.

`make bench` runs the scripts of `benchmarks/` and writes this page. Each script describes its measurement in its
docstring; all figures are in `benchmarks/results.json`.
"""


def gather() -> dict[str, Any]:
    """Return the results of all benchmarks by claim and device; those of this run replace older ones."""
    found: dict[str, Any] = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    if ON_GPU.exists():
        results += json.loads(ON_GPU.read_text())["benchmarks"].values()
    for result in results:
        if any(kind in result for kind in KINDS):
            device, claim = result["environment"]["device"], result.pop("claim")
            found[claim if device == "CPU" else f"{claim} on {device}"] = result
    return dict(sorted(found.items()))


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page: a section for each claim, and what the figures were measured with."""
    yield HEAD
    for claim in CLAIMS:
        yield f"## {_heading(claim, _values(results[claim.script]))}\n"
        found = dict(_by_device(claim.script, results))
        yield f"| Measured by `{claim.script}.py` | {' | '.join(found)} |"
        yield f"| --- |{' ---: |' * len(found)}"
        for text, row, column in claim.figures:
            yield f"| {text} | {' | '.join(_shown(each.get(row, {}).get(column, '')) for each in found.values())} |"
        yield ""
    yield from _environments(results)


def _heading(claim: Claim, on_cpu: Mapping[str, Mapping[str, Any]]) -> str:
    figures = [on_cpu[row][column] for _, row, column in claim.figures]
    ranked = sorted((each for each in figures if "{lowest}" in claim.heading), key=lambda each: each["median"])
    extremes = {"lowest": _short(ranked[0]), "highest": _short(ranked[-1])} if ranked else {}
    return claim.heading.format(*map(_short, figures), **extremes)


def _by_device(script: str, results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    for name, result in results.items():
        if name.partition(" on ")[0] == script:
            yield result["environment"]["device"], _values(result)


def _values(result: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    values: Mapping[str, Mapping[str, Any]] = next(result[kind] for kind in KINDS if kind in result)
    return values


def _shown(value: Any) -> str:
    """Return a figure with its quartiles, or with its interval."""
    if not isinstance(value, Mapping):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if "mean" in value:
        return shown(value)
    spread = f" ({value['q1']:.3g} to {value['q3']:.3g})" if value["q1"] != value["q3"] else ""
    return f"{value['median']:.3g}{spread}"


def _short(value: Any) -> str:
    """Return a figure for a heading, without its spread."""
    if isinstance(value, Mapping) and "median" in value:
        median = value["median"]
        return f"{median:.2g}" if median < 0.995 else f"{median:.3g}"
    return _shown(value).partition(" (")[0]


def _environments(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the versions and machines, and the scripts that ran there."""
    scripts: dict[str, list[str]] = {}
    for name, result in results.items():
        scripts.setdefault(_environment(result["environment"]), []).append(name.partition(" on ")[0])
    yield "## What it was measured with\n"
    yield "| Environment | Scripts |"
    yield "| --- | --- |"
    most = max(scripts.values(), key=len)
    for environment, names in scripts.items():
        yield f"| {environment} | {'all others' if names is most else ', '.join(names)} |"


def _environment(where: Mapping[str, Any]) -> str:
    threads = f"{where['threads']} thread{'s' * (where['threads'] > 1)} of {where['cores']} cores"
    versions = f"Python {where['python']}, torch {where['torch']}, Lightning {where['lightning']}"
    return f"{where['device']}, {threads}; {versions}"


KINDS = ("ratios", "figures", "counts", "healthy runs")


def main() -> None:
    """Write both files."""
    results = gather()
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text("\n".join(page(results)) + "\n")


if __name__ == "__main__":
    main()
