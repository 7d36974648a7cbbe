"""`import lightning_tricks` against an empty interpreter, and against importing what it builds on."""

from __future__ import annotations

import statistics
import subprocess
import sys

from _ratios import arguments, measure, ratios, report


def start(statement: str) -> None:
    """Start an interpreter that runs one statement."""
    subprocess.run([sys.executable, "-c", statement], check=True)


def main() -> None:
    """Measure, print and write."""
    given = arguments(default_rounds=15)
    times = measure(
        {
            "empty interpreter": lambda: start("pass"),
            "import lightning_tricks": lambda: start("import lightning_tricks"),
            "import lightning": lambda: start("import lightning"),
        },
        given.rounds,
        warmup=2,
    )
    empty, ours = (statistics.median(times[name]) for name in ("empty interpreter", "import lightning_tricks"))
    results = {"start-up": ratios(times, peer="empty interpreter")}
    report("import_time", results, given.rounds, given.out)
    if ours - empty > 0.005:
        sys.exit(
            f"import lightning_tricks costs {1000 * (ours - empty):.1f} ms over an empty interpreter, 5 are allowed"
        )


if __name__ == "__main__":
    main()
