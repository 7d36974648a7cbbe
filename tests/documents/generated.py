"""Pages of docs/ that are written by `python -m tests.documents.generated` (`make fix`): support and reference."""

import inspect
import json
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_tricks
from tests.contract.cases import CASES
from tests.contract.lab import SETTINGS

RESULT = Path(__file__).parents[1] / "gpu" / "result.json"
DOCS = Path(__file__).parents[2] / "docs"
_ON_GPU = {"passed": "Tested", "failed": "Fails"}
_ELSEWHERE = """
## What has not been run

The emulated device is a set of CPU tensors under the name `cuda:0`. It finds tensors that are created, left or restored
on the wrong device, branches on the device, and reads that make the host wait. On it all callbacks, one ensemble of
each kind and all presets of `TricksMixin` train, stop and resume, with the bits of the CPU. After the first batch, only
rows of `RunFingerprint` and images of `ImageLogger` make the host wait in a training batch.

| Where | Simulated | Not run |
| --- | --- | --- |
| CUDA | devices, copies, waits, random numbers, fp16 with a GradScaler | kernels, streams, memory: `make gpu` does |
| multiple GPUs | the same program on two ranks of the CPU | NCCL: `make gpu` does |
| MPS (macOS) | no float64, no fork, no `/proc`, only `fcntl` | training on it |
| Windows | paths, file names, signals, locks, encodings; types are checked for it | the package itself |
| Slurm, two nodes | `make slurm`, on a Slurm of one node; two groups of processes | a cluster of multiple machines |
| TPU, HPU, DeepSpeed | nothing | all |
"""
_NOTE = "<!-- written by `make fix` -->\n"


def support_page(on_gpu: Mapping[str, Any] | None) -> str:
    """Setting x trick, from the contract's cases and from what `make gpu` wrote."""
    meanings = {name: setting.meaning for name, setting in SETTINGS.items()}
    meanings |= {"resume": "from a checkpoint at the end of an epoch", "YAML": "built by LightningCLI and saved again"}
    if on_gpu:
        meanings["CUDA"] += f": {on_gpu['device']}, torch {on_gpu['torch']}"
    columns = ["Tested", "Refuses", "Untested", *(["Fails"] if on_gpu else [])]
    lines = [f"| | Setting | {' | '.join(columns)} |", "| --- |" + " --- |" * (1 + len(columns))]
    for setting, meaning in meanings.items():
        names: dict[str, list[str]] = {column: [] for column in columns}
        for name, case in CASES.items():
            found = _ON_GPU.get(on_gpu["callbacks"].get(name), "Untested") if on_gpu else "Untested"
            mark = "Refuses" if setting in case.refuses else found if setting == "CUDA" else "Tested"
            names[mark].append(name)
        lines.append(f"| {setting} | {meaning} | {' | '.join(map(_named, names.values()))} |")
    text = f"""# Support

{_NOTE}
Which of the {len(CASES)} callbacks work in which setting.

- Tested: a test trains with the callback in this setting and compares the result.
- Refuses: the callback raises an error before training starts, with the remedy.
- Untested: not run in this setting yet.
"""
    return "\n".join([text, *lines, _ELSEWHERE])


def _named(names: Sequence[str]) -> str:
    """Return how a cell names callbacks: each one, if there are few."""
    if len(names) <= 5:
        return ", ".join(f"`{name}`" for name in names)
    missing = [name for name in CASES if name not in names]
    return f"all but {', '.join(f'`{name}`' for name in missing)}" if missing else "all"


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
