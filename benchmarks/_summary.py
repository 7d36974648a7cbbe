"""Gather what the benchmarks wrote into `benchmarks/results.json`, and into the table of `docs/benchmarks.md`.

A benchmark that was not run again keeps its figures, and the versions that they were measured with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ON_GPU = HERE.parent / "tests" / "gpu" / "result.json"  # of `make gpu`
SUMMARY, PAGE = HERE / "results.json", HERE.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

What the scripts under `benchmarks/` measured, written by `make bench`: contestant and peer run alternately in one
process. A ratio is the median over the rounds of what the contestant takes over what the peer takes, unless the case
says otherwise: below 1, the contestant takes less. The spread is the range between the quartiles.
"""


def gather() -> dict[str, Any]:
    """Return the results of all benchmarks by claim and device; those of this run replace older ones."""
    found: dict[str, Any] = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    if ON_GPU.exists():
        results += json.loads(ON_GPU.read_text())["benchmarks"].values()
    for result in results:
        if "ratios" in result:
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
        yield f"{where['device']}, {threads}, {result['rounds']} rounds; {_versions(where)}.\n"
        yield "| case | contestant | peer | ratio | spread |"
        yield "| --- | --- | --- | ---: | --- |"
        for case, contestants in result["ratios"].items():
            for name, ratio in contestants.items():
                spread = f"{ratio['q1']:.3g} to {ratio['q3']:.3g}" if ratio["q1"] != ratio["q3"] else "counted"
                yield f"| {case} | {name} | {ratio.get('peer', '')} | {ratio['median']:.3g} | {spread} |"
        yield ""


def _versions(where: Mapping[str, Any]) -> str:
    return f"Python {where['python']}, torch {where['torch']}, Lightning {where['lightning']}, {where['cores']} cores"


def main() -> None:
    """Write both files."""
    results = gather()
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text("\n".join(page(results)) + "\n")


if __name__ == "__main__":
    main()
