"""Run the first example of README.md with a Python that has the package installed, as `make release-check` does.

python tests/packaging/readme_example.py PYTHON
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

_README = Path(__file__).parents[2] / "README.md"
_EXAMPLE = re.compile(r"^```python\n(.*?)^```\n+(?:```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def example():
    """Return the program and what it prints; the text is None where README.md shows no output."""
    return _EXAMPLE.search(_README.read_text(encoding="utf-8")).groups()


def run(python):
    """Run the example in an empty folder, outside the checkout, and compare what it prints at the end."""
    code, output = example()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example.py").write_text(code, encoding="utf-8")
        command = [python, "-W", "ignore", "example.py"]
        ran = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, encoding="utf-8", check=True)
        where = [python, "-c", "import lightning_tricks; print(lightning_tricks.__file__)"]
        file = Path(subprocess.run(where, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    if _README.parent / "lightning_tricks" in file.parents:
        sys.exit(f"{python} imports the checkout, not the wheel: unset PYTHONPATH.")
    if output and not ran.stdout.rstrip().endswith(output.rstrip()):
        sys.exit(f"The example of README.md prints something else:\n{ran.stdout}")
    sys.stdout.write(f"The example of README.md prints what it shows, with {file.parent}\n")


if __name__ == "__main__":
    run(str(Path(sys.argv[1]).absolute()))
