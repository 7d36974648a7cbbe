"""The page that compares two runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.text import format_number, format_seconds, format_time
from lightning_tricks.run_report.core import curves
from lightning_tricks.run_report.core.findings import find_all
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.rendering import render
from lightning_tricks.run_report.core.svg import Figure, Line, line_chart

_MOST_ROWS, _LONGEST_NAME = 300, 300
_TOLD_BY = {  # facts -> the settings that tell them, too, if they are recorded; of a second optimizer, that of its name
    ("trainer", "optimizer"): "optimizer 0",
    ("trainer", "schedulers"): "scheduler 0",
    ("data", "training batch size"): "train_dataloader.batch_size",
    ("data", "training workers"): "train_dataloader.num_workers",
    ("data", "validation batch size"): "val_dataloaders.batch_size",
    ("data", "validation workers"): "val_dataloaders.num_workers",
}
Runs: TypeAlias = tuple[RunRecord, RunRecord]


def comparison_page(first: RunRecord, second: RunRecord, names: Sequence[str] = ("A", "B")) -> str:
    """Return an HTML page that compares two runs.

    Args:
        first: One run.
        second: The other run.
        names: The names of the two runs.

    Examples:
        >>> from lightning_tricks.run_report import RunRecord
        >>> "What differs" in comparison_page(RunRecord(step=100), RunRecord(step=200))
        True
    """
    runs = (first, second)
    differences, sentences = _differences(runs, names)
    keys = dict.fromkeys(key for run in runs for _, key in curves.metric_curves(run))
    return render(
        "comparison.html",
        f"{names[0]} and {names[1]}",
        is_running=False,
        names=names,
        differences=differences,
        sentences=sentences,
        curves=_metric_figures(runs, names),
        values=values_of(runs, list(keys)[:_MOST_ROWS]),
        rates_and_norms=_other_figures(runs, names),
        findings_of_each=[(name, find_all(run)) for name, run in zip(names, runs, strict=True)],
    )


def settings_of(record: RunRecord, told: Collection[str] = ()) -> dict[str, str]:
    """Return all that a run was told or depends on, by name, without facts about the Trainer that are told already."""
    groups = {"hyper-parameter": record.arguments, "trainer": record.trainer, "data": record.data}
    settings = dict(record.settings)
    found = {
        f"{name} ({group})": text
        for group, facts in groups.items()
        for name, text in facts
        if group == "hyper-parameter" or not (name in told or _TOLD_BY.get((group, name), name) in settings)
    } | settings
    found |= {f"version of {name}": text for name, text in record.versions}
    if record.git is not None:
        found["git commit"] = record.git.commit[:12]
        found["git branch"] = record.git.branch
        found["files that git did not compare"] = ", ".join(record.git.not_compared[:20]) or "none"
        found["new files"] = ", ".join(name[3:] for name in record.git.changed if name.startswith("??"))[:300] or "none"
    return found


def differing_settings(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    """Return the settings that differ in effect: name, text in the first run, text in the second; "-" if it lacks it.

    What only one run has, such as a callback, is one row without its arguments. An argument that only one run has is
    none if it is at its default.
    """
    orders = [run.setup.callbacks for run in (first, second)]
    # that callbacks differ is told by their own rows, but for their order
    is_told = all(orders) and first.settings and second.settings and _have_same_order(*orders)
    both = [settings_of(run, ("callbacks",) if is_told else ()) for run in (first, second)]
    owners = [{prefix for name in settings for prefix in _prefixes(name)} for settings in both]
    known = [
        {name.removesuffix(".type") for name in settings} | {*(run.setup.schedulers or ())}
        for run, settings in zip((first, second), both, strict=True)
    ]
    there = [own | names for own, names in zip(owners, known, strict=True)]
    lacking = ((owners[0] & known[0]) - there[1]) | ((owners[1] & known[1]) - there[0])
    defaults = {*first.defaults, *second.defaults} - (both[0].keys() & both[1].keys())
    differing = []
    for name, left, right in _differing(*both):
        owner = next((prefix for prefix in _prefixes(name) if prefix in lacking), name)
        if name in (owner, f"{owner}.type") and owner not in defaults:
            differing.append((owner, left, right))
    diffs = [run.git.diff if run.git is not None else "" for run in (first, second)]
    if diffs[0] != diffs[1]:
        files = [dict(part.partition("\n")[::2] for part in f"\n{diff}".split("\ndiff --git ")[1:]) for diff in diffs]
        names = [name for name in {**files[0], **files[1]} if files[0].get(name) != files[1].get(name)]
        shown = {name: name[len(name) // 2 + 3 :] for name in names}  # "a/NAME b/NAME" -> "NAME"
        left, right = (", ".join(shown[name] for name in names if name in file)[:300] or "none" for file in files)
        differing.append(("uncommitted changes, which differ in", left, right))
    return differing


def _have_same_order(*names: Sequence[str]) -> bool:
    """Whether the names that two lists have in common stand in the same order."""
    common = {*names[0]} & {*names[1]}
    return [name for name in names[0] if name in common] == [name for name in names[1] if name in common]


def _prefixes(name: str) -> list[str]:
    """Return what a setting belongs to, the outermost first: "layer a" and "layer a.0" of "layer a.0.bias"."""
    return [name[:place] for place, letter in enumerate(name[:_LONGEST_NAME]) if letter == "."]


def _differences(runs: Runs, names: Sequence[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return what differs between two runs, as rows of a table, and what else is to be said."""
    first, second = runs
    rows = [
        ("started", format_time(first.started), format_time(second.started)),
        ("status", first.status, second.status),
        ("training took", format_seconds(first.seconds), format_seconds(second.seconds)),
        ("steps", f"{first.step:,}", f"{second.step:,}"),
        ("epochs", f"{first.epochs:,}", f"{second.epochs:,}"),
        ("resumes", str(len(first.resumes)), str(len(second.resumes))),
        ("module", first.module, second.module),
    ]
    facts = [{f"{name} ({one.title})": text for one in run.parts_of(Facts) for name, text in one.facts} for run in runs]
    rows = [*(row for row in rows if row[1] != row[2]), *_differing(*facts)]
    settings = differing_settings(first, second)
    left_out = "An argument that only one run has is not listed if it has its default."
    said = [left_out if settings else "No recorded setting or version differs."]
    if len(settings) > _MOST_ROWS:
        said.append(f"{len(settings) - _MOST_ROWS:,} more settings differ.")
    for run, name in zip(runs, names, strict=True):
        if run.not_recorded:
            said.append(f"Not recorded for {name}, and not compared: {'; '.join(run.not_recorded)}.")
        if run.git is not None and run.git.is_cut:
            said.append(f"Only the beginning of the uncommitted changes of {name} is compared.")
    return [*settings[:_MOST_ROWS], *rows], list(dict.fromkeys(said))


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the names of texts that differ, with both texts; "-" where one is missing."""
    names = {**first, **second}
    return [(key, first.get(key, "-"), second.get(key, "-")) for key in names if first.get(key) != second.get(key)]


def _metric_figures(runs: Runs, names: Sequence[str]) -> list[Figure]:
    drawn: dict[str, tuple[str, list[Line], dict[str, int]]] = {}  # quantity -> its name, lines and kinds of dashes
    for color, (run, name) in enumerate(zip(runs, names, strict=True)):
        for parts, key in curves.metric_curves(run):
            points = curves.mean_of_noisy(run.curve(key))
            loader = f"loader {parts.loader}" if parts.loader else ""
            series = " ".join(word for word in (parts.stage, loader, parts.kind) if word)
            is_train = parts.stage == "train"
            best = None if is_train or len(points) < 2 else curves.best_point(points, curves.sign_of_better(parts.name))
            _, lines, dashes = drawn.setdefault(parts.quantity, (parts.name, [], {}))
            dash = 1 if is_train else dashes.setdefault(series, (0, 2, 3)[len(dashes) % 3])
            lines.append(Line(f"{name} {series}".rstrip(), points, color, dash=dash, best=best))
    return [
        Figure(name, line_chart(lines, may_be_log="loss" in name.lower()), lines)
        for name, lines, _ in drawn.values()
        if any(len(line.points) > 1 for line in lines)
    ]


def _other_figures(runs: Runs, names: Sequence[str]) -> list[Figure]:
    topics = curves.LEARNING_RATE, curves.GRADIENTS
    keys = [key for topic in topics for run in runs for key in curves.keys_of_topic(run, topic)]
    figures = []
    for key in list(dict.fromkeys(keys))[:12]:
        shown = list if key.startswith("learning_rate") else curves.mean_of_noisy
        named = enumerate(zip(runs, names, strict=True))
        lines = [Line(name, shown(run.curve(key)), color, dash=color) for color, (run, name) in named]
        label = curves.label_of_rate(key)
        title = key.replace("_", " ") if label == key else f"lr of {label}"
        figures.append(Figure(title, line_chart(lines), [line for line in lines if line.points]))
    return figures


def values_of(runs: Runs, keys: Iterable[str]) -> list[tuple[str, ...]]:
    """Return metrics of two runs: key, the last value of each, their difference, and the best value of each."""
    rows = []
    for key in keys:
        both = [run.curve(key) for run in runs]
        last = [points[-1].value if points else None for points in both]
        best = [curves.best_point(points, curves.sign_of_better(curves.split_key(key).name)) for points in both]
        difference = None if last[0] is None or last[1] is None else last[1] - last[0]
        numbers = (*last, difference, *(None if point is None else point.value for point in best))
        rows.append((key, *map(format_number, numbers)))
    return rows
