"""Pages of docs/ that are written by `python -m tests.documents.generated` (`make fix`): support and reference."""

import inspect
import json
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_tricks
from tests.contract.cases import CASES
from tests.contract.lab import SETTINGS

RESULT = Path(__file__).parents[1] / "gpu" / "result.json"
DOCS = Path(__file__).parents[2] / "docs"
_ON_GPU = {"passed": "✓", "failed": "fails"}
_ELSEWHERE = """
## What nobody has run

The emulated device holds CPU tensors under the name `cuda:0`. It finds tensors that are made, left or restored on the
wrong device, branches on the device, and what the host waits for: on it all callbacks, one ensemble of each kind and
all presets of `TricksMixin` train, are stopped and resumed, with the bits of the CPU. No callback lets the host wait in
a training batch after the first, but where it writes something then: rows of `RunFingerprint`, images of `ImageLogger`.

| where | what is simulated | what nobody has run |
| --- | --- | --- |
| CUDA | devices, copies, waits, random numbers, fp16 with a GradScaler | kernels, streams, memory: `make gpu` does |
| several GPUs | the same program on two ranks of the CPU | NCCL; `make gpu` does |
| MPS (macOS) | no float64, no fork, no `/proc`, `fcntl` alone | training on it |
| Windows | paths, names of files, signals, locks, encodings; types are checked for it | the package itself |
| Slurm, two nodes | `make slurm`, on a Slurm of one node; two groups of processes | a cluster of several machines |
| TPU, HPU, DeepSpeed | nothing | all |
"""
_NOTE = "<!-- written by `make fix` -->\n"


def support_page(on_gpu: Mapping[str, Any] | None) -> str:
    """Trick x setting, from the contract's cases and from what `make gpu` wrote."""
    columns = [*SETTINGS, "resume", "YAML"]
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " :-: |" * len(columns)]
    for name, case in CASES.items():
        marks = dict.fromkeys(columns, "✓") | dict.fromkeys(case.refuses, "refuses")
        marks["CUDA"] = _ON_GPU.get(on_gpu["callbacks"].get(name), "untested") if on_gpu else "untested"
        lines.append(f"| `{name}` | " + " | ".join(marks.values()) + " |")
    meanings = {name: setting.meaning for name, setting in SETTINGS.items()}
    meanings |= {"resume": "from a checkpoint at the end of an epoch", "YAML": "built by LightningCLI and saved again"}
    if on_gpu:
        meanings["CUDA"] += f": {on_gpu['device']}, torch {on_gpu['torch']}"
    text = f"""# Support

{_NOTE}
Which callback works in which setting. Every ✓ stands for a test that trains there and compares the result.

- ✓: tested.
- refuses: says so before training starts, and names the remedy.
- untested: nobody has run it there yet.
"""
    rows = [f"| {name} | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join([text, *lines, "", "| column | setting |", "| --- | --- |", *rows, _ELSEWHERE])


def reference_pages() -> dict[str, str]:
    """Return the pages of the reference: an index of the public names, and a page for each package."""
    text = f"""# Reference

{_NOTE}
The names that `import lightning_tricks` offers. They are public: after a deprecation warning each stays for at least
one minor release.
"""
    index, pages = [text], {}
    for title, package, paths in _packages():
        names = {path.rpartition(".")[2] for path in paths} & {*lightning_tricks.__all__}
        index += [f"## [{title}]({title}.md)", "", *(["| Name | What it does |", "| --- | --- |"] if names else [])]
        for name in sorted(names, key=lambda name: (name not in CASES, name)):
            index.append(f"| `{name}` | {inspect.getdoc(getattr(lightning_tricks, name)).splitlines()[0]} |")
        index.append("")
        lines = [f"# {title}", "", _NOTE]
        if package:
            lines += [f"::: {package}", "    options: {members: false, show_root_heading: false}", ""]
        pages[f"{title}.md"] = "\n".join([*lines, *(f"::: {path}\n" for path in paths)])
    return {"index.md": "\n".join(index), **pages}


def _packages() -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, package (if one has a docstring of its own) and public names of each page of the reference."""
    for module in pkgutil.iter_modules(lightning_tricks.__path__, "lightning_tricks."):
        if module.ispkg and "._" not in module.name:
            names = sorted(import_module(module.name).__all__)
            yield module.name.partition(".")[2], module.name, [f"{module.name}.{name}" for name in names]
    yield "mixin", "", ["lightning_tricks.mixin.TricksMixin", "lightning_tricks.tricks.Tricks"]
    yield "command_line", "", ["lightning_tricks.training_cli.TricksCLI"]


def pages() -> dict[Path, str]:
    """Return file -> text of every generated page."""
    reference = {DOCS / "reference" / name: text for name, text in reference_pages().items()}
    on_gpu = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else None
    return {DOCS / "support.md": support_page(on_gpu), **reference}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
