"""Pages of docs/ that are written by `python -m tests.documents.generated` (`make fix`): support and reference."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_tricks
from lightning_tricks._lazy import public_packages
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
| shards of nodes with own disks | two nodes on one machine, a folder each | a cluster of multiple machines |
| Ray Train | `make ray`, on a Ray of two nodes on one machine | a cluster of multiple machines |
| object stores | emulators of S3, Google Cloud Storage and Azure, and `file://` | a real cloud |
| SageMaker, SkyPilot, Kubernetes | nothing | all |
| TPU, HPU, DeepSpeed | nothing | all |

## Object stores

What `tests/object_stores` and `make emulators` run with `AutoResume(address)`. A fault is a write that the server
denies or fails, or a checkpoint that is damaged or missing.

| Address | run | kill | resume on an empty machine | fault |
| --- | --- | --- | --- | --- |
| `s3://`, on a local server (moto) | tested | tested | tested | tested |
| `file://` | tested | tested | tested | tested |
| `gs://`, on gcp-storage-emulator | tested | tested | tested | a damaged checkpoint |
| `az://`, on azurite | tested | tested | tested | a damaged checkpoint |
| `memory://`, in one process | tested | untested | untested | untested |
"""
_NOTE = "<!-- written by `make fix` -->\n"
_INDEX = f"""# Reference

{_NOTE}
What most programs need, by task. Import these names from `lightning_tricks`, and a name that is shown with its package,
such as `ensembles.VotingClassifier`, from that package: `from lightning_tricks.ensembles import VotingClassifier`.
All names in this reference are public: each stays for at least one minor release after a deprecation warning.
"""
# In the order of the features in the README; each name of the top level is in one of them
_GROUPS = {
    "Reproduce and resume": "AutoResume SeedEverything seed_everything RunFingerprint assert_resumable",
    "Stable training": "GradientClipping Microbatching SpikeGuard OptimizerSpec ScheduleSpec "
    "ExponentialMovingAverage RestoreBest EndTogether",
    "See and measure": (
        "RunReport HangWatch ValidateFirst MetricsMonitor PredictionWriter ImageLogger FlopsReport count_flops "
        "ModelReport"
    ),
    "Weights and fine-tuning": (
        "load_weights save_weights read_checkpoint CheckpointRemapping replace_head "
        "LoRA Adapters PrefixTuning GradualUnfreezing TrainableCheckpoint"
    ),
    "Ensembles and uncertainty": "VotingClassifier cross_validate ConformalClassifier ConformalRegressor calibrate",
    "Devices": "select_gpus list_gpus DeviceMonitor CudaMemory NvtxRanges",
    "All of them in a module": "TricksMixin Tricks",
}
_SOUGHT = " ".join(_GROUPS.values()).split()
_METHODS = (property, classmethod, staticmethod)
_OF_A_BASE = dict.fromkeys(("ConformalClassifier", "ConformalRegressor"), "coverage")  # that has no page
# Methods for users; what a family overrides is in the docstring of `Ensemble`
_OF_ALL_ENSEMBLES = ("predict", "predict_uncertainty", "member_outputs", "evaluate")
_OF_ALL_ENSEMBLES += ("from_torchensemble", "to_torchensemble")
_OTHER_ENSEMBLES = """## The other ensembles

They take the arguments of `VotingClassifier` and have its methods. `VotingRegressor` and the other regressors average
predictions instead of probabilities: `criterion` is the mean squared error by default, `n_outputs` is the number of
values that are predicted for each sample, and `voting_strategy` must be "soft".
"""


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
    pages = {f"{title}.md": _reference_page(title, package, paths) for title, package, paths in _packages()}
    return {"index.md": _reference_index(), **pages}


def _reference_index() -> str:
    """First the names that everybody looks for, as the README groups its features; then the rest of each package."""
    homes = {path.rpartition(".")[2]: (title, path) for title, _, paths in _packages() for path in paths}
    parts = [_INDEX]
    for group, names in _GROUPS.items():
        parts += [f"## {group}", "", "| Name | What it does |", "| --- | --- |"]
        for name in names.split():
            title, path = homes[name]
            shown = name if name in lightning_tricks.__all__ else f"{title}.{name}"
            parts.append(f"| [`{shown}`]({title}.md#{path}) | {_summary(path)} |")
        parts.append("")
    if missing := {*lightning_tricks.__all__} - {*_SOUGHT}:
        raise ValueError(f"_GROUPS lacks {', '.join(sorted(missing))}: write each where a reader looks for it.")
    parts += ["## All packages", "", "| Package | What else it offers |", "| --- | --- |"]
    for title, package, paths in _packages():
        others = [f"`{name}`" for name in _in_order(paths) if name not in _SOUGHT]
        if others:
            parts.append(f"| [`{package or title}`]({title}.md) | {', '.join(others)} |")
    return "\n".join([*parts, ""])


def _reference_page(title: str, package: str, paths: list[str]) -> str:
    """Return a page that begins with the callback, and ends with what is said about the package as a whole."""
    lines = [f"# {title}", "", _NOTE]
    guide = DOCS / "tricks" / f"{title.replace('_', '-')}.md"
    if guide.exists():
        lines += [f"Examples, costs and limits are on [the page of this trick](../tricks/{guide.name}).", ""]
    names = _in_order(paths)
    if package:
        top = [f"`{name}`" for name in names if name in lightning_tricks.__all__]
        also = f"; {', '.join(top)} also from `lightning_tricks`" if top else ""
        lines += [f"Import these names from `{package}`{also}.", ""]
    home = {path.rpartition(".")[2]: path for path in paths}
    if package == "lightning_tricks.ensembles":
        families = [name for name in names if name.endswith(("Classifier", "Regressor"))]
        shared = f"{{inherited_members: true, members: [{', '.join(_OF_ALL_ENSEMBLES)}]}}"
        lines += [f"::: {home['VotingClassifier']}", f"    options: {shared}", ""]
        lines += [*_other_ensembles(families), f"::: {home['Ensemble']}", "    options: {members: false}", ""]
        names = [name for name in names if name not in {*families, "Ensemble"}]
    for name in names:
        lines.append(f"::: {home[name]}")
        if shared := _OF_A_BASE.get(name):
            lines.append(f"    options: {{inherited_members: true, members: [{shared}]}}")
        elif (members := _own_members(_resolve(home[name]))) is not None:
            lines.append(f"    options: {{members: {_listed(members)}}}")
        lines.append("")
    if package:
        lines += ["## About this package", "", f"::: {package}"]
        lines += ["    options: {members: false, show_root_heading: false}", ""]
    return "\n".join(lines)


def _other_ensembles(families: list[str]) -> list[str]:
    """Return a table of the ensembles beside `VotingClassifier`, with the arguments that it lacks or has alone."""
    lines = [
        _OTHER_ENSEMBLES,
        "| Classes | What they do | Arguments of their own | Not taken |",
        "| --- | --- | --- | --- |",
    ]
    common = inspect.signature(_resolve("lightning_tricks.ensembles.VotingClassifier")).parameters
    for name in families:
        if not name.endswith("Classifier") or name == "VotingClassifier":
            continue
        path = f"lightning_tricks.ensembles.{name}"
        parameters, texts = inspect.signature(_resolve(path)).parameters, _argument_texts(path)
        own = [f"`{argument}`: {texts[argument]}" for argument in parameters if argument not in common]
        lacks = [f"`{argument}`" for argument in common if argument not in parameters]
        regressor = name.replace("Classifier", "Regressor")
        lines.append(f"| `{name}`, `{regressor}` | {_summary(path)} | {'<br>'.join(own)} | {', '.join(lacks)} |")
    return [*lines, ""]


def _argument_texts(path: str) -> dict[str, str]:
    """Return what the docstring says of each argument."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(_resolve(path)) or "", re.MULTILINE | re.DOTALL)
    texts = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1], re.MULTILINE | re.DOTALL)
    return {argument: " ".join(text.split()) for argument, text in texts}


def _own_members(kind: Any) -> list[str] | None:
    """Return the members to show, if some of a class are only a base class's again; None shows all of them."""
    if not inspect.isclass(kind):
        return None
    inherited = {name for base in kind.__mro__[1:] for name in vars(base)} - {"forward"}
    public = {name: value for name, value in vars(kind).items() if not name.startswith(("_", "on_")) and value.__doc__}
    public = {name for name, value in public.items() if callable(value) or isinstance(value, _METHODS)}
    return sorted(public - inherited, key=[*vars(kind)].index) if public & inherited else None


def _listed(members: list[str]) -> str:
    return f"[{', '.join(members)}]" if members else "false"


def _in_order(paths: list[str]) -> list[str]:
    """Return the names with callbacks first, then the others that everybody looks for."""
    names = [path.rpartition(".")[2] for path in paths]
    place = {name: place for place, name in enumerate(_SOUGHT)}
    return sorted(names, key=lambda name: (name not in CASES, place.get(name, len(place)), name))


def _resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _summary(path: str) -> str:
    """Return the first line of a docstring."""
    return inspect.getdoc(_resolve(path)).splitlines()[0]


def _packages() -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, package (if one has a docstring of its own) and public names of each page of the reference."""
    for package in public_packages():
        names = sorted(import_module(package).__all__)
        yield package.partition(".")[2], package, [f"{package}.{name}" for name in names]
    yield "mixin", "", ["lightning_tricks.mixin.TricksMixin", "lightning_tricks.tricks.Tricks"]
    yield "testing", "lightning_tricks.testing", ["lightning_tricks.testing.assert_resumable"]
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
