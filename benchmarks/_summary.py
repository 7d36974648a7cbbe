"""Gather what the benchmarks wrote into `benchmarks/results.json`, and into the table of `docs/benchmarks.md`.

A benchmark that was not run again keeps its figures, and the versions that they were measured with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SUMMARY, PAGE = HERE / "results.json", HERE.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

What the scripts under `benchmarks/` measured, written by `make bench`: contestant and peer run alternately in one
process. A ratio is the median over the rounds of what the contestant takes over what the peer takes, unless the case
says otherwise: below 1, the contestant takes less. The spread is the range between the quartiles.
"""


def gather() -> dict[str, Any]:
    """Return the results of all benchmarks by claim; those of this run replace older ones."""
    found: dict[str, Any] = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    for path in sorted((HERE / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "ratios" in result:
            found[result.pop("claim")] = result
    return dict(sorted(found.items()))


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield "| claim | case | contestant | peer | ratio | spread | rounds | device |"
    yield "| --- | --- | --- | --- | ---: | --- | ---: | --- |"
    environments: dict[str, list[str]] = {}
    for claim, result in results.items():
        where = result["environment"]
        environments.setdefault(_versions(where), []).append(claim)
        device = f"{where['device']}, {where['threads']} thread{'s' * (where['threads'] > 1)}"
        for case, contestants in result["ratios"].items():
            for name, ratio in contestants.items():
                spread = f"{ratio['q1']:.3g} to {ratio['q3']:.3g}" if ratio["q1"] != ratio["q3"] else "counted"
                cells = [case, name, ratio.get("peer", ""), f"{ratio['median']:.3g}", spread]
                yield f"| {' | '.join([claim, *cells, str(result['rounds']), device])} |"
    yield ""
    for versions, claims in environments.items():
        yield f"- {versions}: {', '.join(claims)}."


def _versions(where: Mapping[str, Any]) -> str:
    return f"Python {where['python']}, torch {where['torch']}, Lightning {where['lightning']}, {where['cores']} cores"


def main() -> None:
    """Write both files."""
    results = gather()
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text("\n".join(page(results)) + "\n")


if __name__ == "__main__":
    main()
