"""Align files whose truth is known with the models they were made of: each tensor is in its place, or refused.

`python -m tests.checkpoint_remapping.sweep` with `--result FILE` is what `make sweep` runs. It takes the architectures
of timm and torchvision that are not too large, and one of each family of transformers, and ends with status 1 where a
tensor is in another's place.

What the message of a refusal says is done for one in `--follow-every` of the files, always the same ones: it takes up
to sixty loads, where the file itself takes two.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers

from lightning_tricks.checkpoint_remapping import Alignment, AmbiguousAlignmentError, align
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match
from tests.checkpoint_remapping.advice import ENDS, LOOPS, MOST_STEPS, STUCK, WARNED, follow, follow_blindly
from tests.checkpoint_remapping.architectures import NotBuiltError, architectures
from tests.checkpoint_remapping.perturbations import PERTURBATIONS, Architecture, File, perturbed, shuffled

RIGHT, REFUSED, WRONG = OUTCOMES = ("right", "refused", "WRONG")
CASES = ("cases", "accepted")  # what a record calls them: with evidence alone, and with all that is suggested
_BUILDERS = architectures()
_MOST_WRONG = 20  # files that are listed
_SEEN = set[str]()  # structures of models; another of the same is not examined
Record = dict[str, Any]  # what was found of one model, as JSON


End = tuple[str, list[str]]  # how a file ended, and the tensors that are in another's place


def outcomes(model: Architecture, file: File) -> dict[str, End]:
    """Align a file with its model; return how it ended with what is evidence alone, and with all that is suggested."""
    tensors = file.tensors(model)
    try:
        found = align(dict(model.tensors), tensors, accept="*")
    except AmbiguousAlignmentError:
        return dict.fromkeys(CASES, (REFUSED, []))
    except Exception as error:  # no file may cause it, and the sweep goes on
        return dict.fromkeys(CASES, (WRONG, [f"{type(error).__name__}: {error}"[:200]]))
    kinds = _strong(found), found.matches
    return {name: _end(model, file, found, which) for name, which in zip(CASES, kinds, strict=True)}


def _strong(found: Alignment) -> list[Match]:
    return [match for match in found.matches if match.strength == "strong"]


def _end(model: Architecture, file: File, found: Alignment, matches: Iterable[Match]) -> End:
    wrong, matched = [], set()
    for match in matches:
        names = tuple(map(found.name_in_file, match.sources))
        if tuple(map(file.truth.get, names)) == match.targets and not match.transpose:
            matched |= {*match.targets}
        else:
            how = ", transposed" * match.transpose
            wrong.append(f"{' + '.join(names)} -> {' + '.join(match.targets)}{how} ({match.reason})")
    wanted = (model.learned & set(file.truth.values())) - file.resized
    return WRONG if wrong else RIGHT if wanted <= matched else REFUSED, wrong


# Projects count what these are names of in the order in which it is computed
_ONE_MEANING = frozenset(
    """
    bn block blocks body conv convs dense encoder encoders fc features gamma group groups h lambda layer layers lin
    linear ln ls module modules net network norm norms resblocks scale sequential stage stages transformer
    """.split()  # noqa: SIM905  # a list of words
)


def renumbered(own: Mapping[str, torch.Tensor], file: Mapping[str, torch.Tensor], most: int = 1) -> list[str]:
    """Number lists of a file from the other end, one at a time; return what then loads elsewhere without a question.

    The numbers of one list are no evidence for those of another one: what loads by them has changed its place. They
    may be between lists of one name, or of names for layers in the order of computing.

    Args:
        own: The tensors of the model.
        file: Those of the file.
        most: The number of lists, of those that differ in more than numbers.
    """
    lists: dict[str, set[int]] = defaultdict(set)
    for name in file:
        for number in re.finditer(r"\d+", name):
            lists[name[: number.start()]].add(int(number[0]))
    kinds = {re.sub(r"\d+", "#", path): path for path, numbers in sorted(lists.items()) if len(numbers) > 1}
    before, lines = _places(own, file), []
    for path in list(kinds.values())[:most] if before else ():
        numbers = sorted(lists[path])
        turned = dict(zip(numbers, reversed(numbers), strict=True))
        behind = re.compile(rf"{re.escape(path)}(\d+)")
        new_names = {
            name: behind.sub(lambda found: f"{path}{turned[int(found[1])]}", name, 1) if behind.match(name) else name  # noqa: B023
            for name in file
        }
        places = _places(own, {new: file[name] for name, new in new_names.items()})
        for name, target in before.items():
            now = places.get(new_names[name], target)
            if now != target and _meaning(path) != _meaning(_list_of(target, now)):
                lines.append(f"{path}#: {new_names[name]} -> {now}, and {name} -> {target}")
    return lines


def _places(own: Mapping[str, torch.Tensor], file: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return which name of the file becomes which of the model without a question."""
    try:
        found = align(dict(own), dict(file))
    except AmbiguousAlignmentError:
        return {}
    return {found.name_in_file(name): match.targets[0] for match in _strong(found) for name in match.sources}


def _list_of(one: str, other: str) -> str:
    """Return the path up to the number in which two names differ."""
    same = next(i for i, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)
    return one[:same].rstrip("0123456789")


def _meaning(path: str) -> set[str]:
    return {*re.split(r"[\d._]+", path.rstrip("._").rpartition(".")[2].lower())} - _ONE_MEANING - {""}


def examine(name: str, follow_every: int | None = 1) -> Record:
    """Build a model, and align all files made of it; where one in so many is refused, do what the message says."""
    try:
        model = _BUILDERS[name]()
    except NotBuiltError as error:
        return {"name": name, "not_built": str(error)}
    record: Record = {
        "name": name,
        "structure": model.structure,
        "tensors": len(model.tensors),
        "cases": {},
        "accepted": {},
        "followed": {},
        "blind": {},
    }
    if model.structure in _SEEN:
        return record
    _SEEN.add(model.structure)
    for perturbation in PERTURBATIONS:
        file = perturbed(model, perturbation)
        if file is not None:
            ends = outcomes(model, file)
            if outcomes(model, shuffled(file)) != ends:
                ends = dict.fromkeys(CASES, (WRONG, ["it depends on the order of the file"]))
            if moved := renumbered(model.tensors, file.tensors(model)):
                ends["cases"] = WRONG, moved
            for name, (end, wrong) in ends.items():
                record[name][perturbation] = [end, len(wrong), *wrong[:3]]
            end = ends["cases"][0]
            if end == REFUSED and follow_every and _is_followed(f"{model.structure}: {perturbation}", follow_every):
                record["followed"][perturbation] = follow(model, file)[:2]
                record["blind"][perturbation] = (follow_blindly(model, file),)
    return record | {"examined": True}


def _is_followed(file: str, every: int) -> bool:
    """Whether a file is among one in so many, whatever else is examined and in which order."""
    return int(hashlib.sha256(file.encode()).hexdigest(), 16) % every == 0


# The result


def as_tables(records: list[Record], sample: str = "") -> str:
    """Return the result as Markdown; of a sample, with how it was taken."""
    built = [record for record in records if "examined" in record]  # one for each structure
    cases, accepted = (
        [(record["name"], name, case) for record in built for name, case in record[part].items()] for part in CASES
    )
    versions = ", ".join(
        f"{library.__name__} {library.__version__}" for library in (timm, torch, torchvision, transformers)
    )
    counts, all_counts = (Counter(case[0] for _, _, case in part) for part in (cases, accepted))
    lines = [
        "# What `make sweep` found",
        "",
        f"{len(built)} architectures with names and shapes of their own, {len(cases)} files; {versions}.",
        *[sample][: bool(sample)],
        f"**{counts[WRONG]} wrong, {counts[RIGHT]} right ({_share(counts)}), {counts[REFUSED]} refused.**",
        f'With all that is suggested accepted (`accept="*"`): {all_counts[WRONG]} wrong, {all_counts[RIGHT]} right '
        f"({_share(all_counts)}), {all_counts[REFUSED]} refused.",
        "",
        "A file holds the tensors of its model under other names or in another order. *Right*: each tensor is in its "
        "place. *Refused*: ambiguous, or only a part was matched, and that correctly. *Wrong*: a tensor is in the "
        "place of another.",
        "",
        *_table("perturbation", ((name, case[0]) for _, name, case in cases), list(PERTURBATIONS)),
        "",
        *_table("library", ((model.partition("/")[0], case[0]) for model, _, case in cases)),
        "",
        *_table("with all accepted", ((name, case[0]) for _, name, case in accepted), list(PERTURBATIONS)),
        "",
        *_followed(built),
        "",
        *_wrong([*cases, *accepted]),
        *_not_built(records),
    ]
    return "\n".join(lines) + "\n"


def _followed(records: list[Record]) -> Iterator[str]:
    """Yield how it ends where the messages of refusals are followed."""
    ends = [(name, end) for record in records for name, (end, _) in record["followed"].items()]
    refused = Counter(name for record in records for name, case in record["cases"].items() if case[0] == REFUSED)
    steps = [count for record in records for end, count in record["followed"].values() if end == RIGHT]
    yield (
        f"Of {len(ends)} of the {refused.total()} refused files, chosen by a fixed rule, what the message proposes is "
        f"done, again and again, at most {MOST_STEPS} times, by somebody who knows which tensor is which, and corrects "
        "what a rule leads to. *Stuck*: no rule is shown, or that was not enough. Right ends took "
        f"{statistics.median(steps or [0]):g} rules in the median."
    )
    yield ""
    yield f"| perturbation | refused | followed | {' | '.join(ENDS)} | share stuck |"
    yield f"|---|{'---:|' * (len(ENDS) + 3)}"
    for row in [*PERTURBATIONS, "all"]:
        counts = Counter(end for name, end in ends if row in (name, "all"))
        if counts:
            numbers = " | ".join(str(counts[end]) for end in ENDS)
            share = 100 * (counts[STUCK] + counts[LOOPS]) / counts.total()
            files = refused.total() if row == "all" else refused[row]
            yield f"| {row} | {files} | {counts.total()} | {numbers} | {share:.1f} % |"
    blind = Counter(end for record in records for (end,) in record["blind"].values())
    yield ""
    yield (
        f"Somebody who takes the first rule or `accept` of each message as it stands: {blind[RIGHT]} right, "
        f"{blind[WARNED]} wrong by a line that said that it may be, {blind[WRONG]} wrong without such a line, "
        f"{blind[STUCK]} refused to the end."
    )


def _wrong(cases: list[tuple[str, str, list[Any]]]) -> Iterator[str]:
    """Yield the first files that are wrong, each with its first tensor."""
    for model, name, case in [row for row in cases if row[2][0] == WRONG][:_MOST_WRONG]:
        yield f"- wrong by {name}: {model}, {case[1]} tensors: {case[2]}"


def _table(title: str, cases: Iterable[tuple[str, str]], rows: list[str] | None = None) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row, end in cases:
        counts[row][end] += 1
    lines = [f"| {title} | files | right | refused | wrong | share loaded |", f"|---|{'---:|' * 5}"]
    for row in rows or sorted(counts):
        numbers = " | ".join(str(counts[row][end]) for end in OUTCOMES)
        lines.append(f"| {row} | {counts[row].total()} | {numbers} | {_share(counts[row])} |")
    return lines


def _share(counts: Counter[str]) -> str:
    return f"{100 * counts[RIGHT] / max(counts.total(), 1):.1f} %"


def _not_built(records: Iterable[Record]) -> list[str]:
    """Return the models that were left out, by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if "not_built" in record:
            library, _, name = record["name"].partition("/")
            reasons[f"{library}, {record['not_built']}"].append(name)
    return [
        "Left out:",
        "",
        *(
            f"- {reason}: {f'{len(names)} models' if 'M parameters' in reason else ', '.join(names)}"
            for reason, names in sorted(reasons.items())
        ),
    ]


def main() -> None:
    """Examine all models, or those of a pattern."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["*"], help="names, or patterns such as timm/resnet*")
    parser.add_argument("--limit", type=int, help="the number of models, evenly spread")
    parser.add_argument("--follow-every", type=int, default=25, help="one in so many refused files is followed")
    parser.add_argument("--result", type=Path, help="a file for the tables")
    arguments = parser.parse_args()
    names = sorted({name for pattern in arguments.models for name in fnmatch.filter(_BUILDERS, pattern)})
    if arguments.limit:
        names = names[:: max(1, len(names) // arguments.limit)][: arguments.limit]
    records = []
    for number, name in enumerate(names, 1):
        records.append(examine(name, arguments.follow_every))
        ends = Counter(case[0] for case in records[-1].get("cases", {}).values())
        sys.stdout.write(f"{number}/{len(names)} {name}: {records[-1].get('not_built', dict(ends))}\n")
        gc.collect()
    sample = f"A sample: `--limit {arguments.limit}`, evenly spread over the names." if arguments.limit else ""
    if arguments.result:
        arguments.result.write_text(as_tables(records, sample))
    ends = [
        end for record in records for part in ("cases", "followed", "blind") for end in record.get(part, {}).values()
    ]
    wrong = sum(end[0] in (WRONG, LOOPS) for end in ends)
    sys.stdout.write(f"{len(names)} models: {wrong} files wrong\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
