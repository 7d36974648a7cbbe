"""`load_weights`: plan which tensor of a file goes where in a model, check the plan before any change, and load."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from lightning_tricks._shared.added_parameters import added_names, names_added_by_peft
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.patterns import Pattern, parse_patterns
from lightning_tricks._shared.tensors import is_on_meta
from lightning_tricks._shared.text import format_shape, list_names
from lightning_tricks.checkpoint_remapping.core import other_forms
from lightning_tricks.checkpoint_remapping.core.atomic_loading import load_tensors
from lightning_tricks.checkpoint_remapping.core.errors import (
    AmbiguousAlignmentError,
    CheckpointError,
    NothingLoadedError,
)
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import AVERAGE, Checkpoint, checkpoint_of_values
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.core.matching.alignment import (
    Alignment,
    ambiguous_cases,
    describe_ambiguity,
    describe_suggestions,
    suggestions_for,
)
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import find_tensors
from lightning_tricks.checkpoint_remapping.core.matching.matches import Match, Mismatch, in_words, suggested_patterns
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from lightning_tricks.checkpoint_remapping.core.remapping import RulesArgument, apply_rules, strip_wrappers

Source = str | os.PathLike[str] | Checkpoint | Mapping[str, Any]
Patterns = str | Iterable[str]


def load_weights(
    model: nn.Module,
    path: Source,
    *,
    rules: RulesArgument = "auto",
    submodule: str | None = None,
    allow_missing: Patterns = (),
    allow_unexpected: Patterns = (),
    allow_mismatched: Patterns = (),
    interpolate: Patterns = (),
    accept: Patterns = (),
    assign: bool | None = None,
    key: str | None = None,
    ema: bool = False,
) -> LoadReport:
    """Load weights from any checkpoint format into a model, matching renamed layers.

    Everything is checked before the first value changes: missing tensors, unexpected tensors and tensors of another
    shape raise an error unless a pattern allows them. Buffers that a model computes itself (BatchNorm's counters,
    position indices) may be missing.

    Args:
        model: The model. Its precision and devices do not change; on the meta device it takes the file's tensors.
        path: As in `read_checkpoint`, its result, tensors by name, or a dict that `torch.load` returned.
        rules: `"auto"` finds the mapping (`align`). A list of rules or the path of a YAML file of rules is applied
            first (`remap_keys`), and all other names are matched as with `"auto"`, unless the last rule is
            `"only"`. `"wrappers"` only strips wrappers' parts from names, and None takes the names as they are.
        submodule: Qualified name of the part of the model that takes the weights, such as `"backbone"`.
        allow_missing: Patterns (a glob, or `re:` and a regular expression) of names of the model that may be missing.
        allow_unexpected: Patterns of names of the file, without wrappers' parts, that may be left over. If the file
            has two models, such as a student and its teacher, name the one that you do not want.
        allow_mismatched: Patterns of names of the model that keep their values if shapes differ.
        interpolate: Patterns of names of position embeddings of the model, which are resized from a square grid to the
            grid of the model's patches, or to a square if the model does not define one.
        accept: Patterns of names of the model for which suggestions are taken: likely matches that the error shows,
            such as a list that projects may count from either end.
        assign: Whether tensors replace the model's instead of being copied into them; None replaces only tensors on
            the meta device. Tensors that replace others stay mapped from the file: never write to it.
        key: As in `read_checkpoint`.
        ema: Whether to load the average of the weights that `ExponentialMovingAverage`, Lightning's
            `EMAWeightAveraging` or timm (`state_dict_ema`) has saved.

    Returns:
        A report of what was loaded and what was not.

    Raises:
        CheckpointError: If something is missing, left over or of another shape and no pattern allows it, or the file
            has no average with `ema=True`; the model is then not modified. Other errors are those of `read_checkpoint`
            and `align`.
        NothingLoadedError: If no tensor fits.
        AttributeError: If the model has no such submodule.
        ValueError: If `ema=True` is given with a `key` or with what was read already.

    Examples:
        >>> model = torch.nn.Linear(2, 3)
        >>> report = load_weights(model, {"module.weight": torch.zeros(3, 2), "module.bias": torch.ones(3)})
        >>> report.loaded, report.diagnosis
        (2, 'all 2 keys carry `module.`: saved from DataParallel, DistributedDataParallel or an averaged model.')
    """
    if ema and (key is not None or isinstance(path, Checkpoint)):
        given = f"key={key!r}" if key is not None else "a Checkpoint that was read already"
        raise ValueError(f"ema=True chooses the weights of a file, and so does {given}: give one of them.")
    module = model.get_submodule(submodule) if submodule else model
    plan = plan_loading(
        module,
        path,
        rules,
        key=AVERAGE if ema else key,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        allow_mismatched=allow_mismatched,
        interpolate=interpolate,
        accept=accept,
    )
    report = plan.report
    load_tensors(module, plan.tensors, assign)
    left = [name for name, tensor in module.state_dict().items() if is_on_meta(tensor)]
    if not left:
        return report
    return replace(
        report, diagnosis=f"{report.diagnosis} Still on the meta device, without values: {list_names(left)}."
    )


@dataclass(frozen=True)
class LoadReport:
    """The result of `load_weights`.

    Attributes:
        loaded: Number of tensors of the model that were loaded.
        total: Number of tensors of the model.
        renamed: The model's names by the file's names, if they differ.
        missing: Names of the model without a tensor in the file.
        unexpected: Names of the file, without wrappers' parts, without a tensor in the model.
        mismatched: Names of the model whose shapes or kinds differ, and which kept their values.
        diagnosis: A sentence that describes the file.
        alignment: The match of each tensor with its reason and evidence; its `report()` is a table.
    """

    loaded: int
    total: int
    renamed: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    diagnosis: str
    alignment: Alignment

    def __str__(self) -> str:
        return f"{self.alignment.summary()}: {self.diagnosis}"


def plan_loading(
    module: nn.Module, path: Source, rules: RulesArgument = "auto", *, key: str | None = None, **patterns: Patterns
) -> LoadPlan:
    """Do all of `load_weights` but the loading; the arguments are the same, and its patterns are those of names."""
    if isinstance(rules, str | os.PathLike):
        check_path("rules", rules, "a file of rules")
    parsed = {argument: parse_patterns(argument, given) for argument, given in patterns.items()}
    if isinstance(path, Checkpoint):
        checkpoint = path
    elif isinstance(path, Mapping):
        checkpoint = checkpoint_of_values(path, key)
    else:
        checkpoint = read_checkpoint(path, key=key)
    plan = LoadPlan(module, checkpoint, rules, parsed)
    plan.check()
    return plan


class LoadPlan:
    """What loading does: the file's tensors under the names of the model.

    Args:
        module: The model.
        checkpoint: The file.
        rules: The caller's rules, as in `load_weights`.
        patterns: The caller's patterns by argument: those of what need not fit, and those of `interpolate`.

    Attributes:
        loaded: The tensors that are loaded, under the model's names.
        tensors: The same, and the values of `get_extra_state`.
        alignment: Which tensor of the file became which of the model.
        model_tensors: The model's tensors; of tied ones, all names.
        rules: What the rules made of the file.
    """

    def __init__(
        self, module: nn.Module, checkpoint: Checkpoint, rules: RulesArgument, patterns: Mapping[str, Sequence[Pattern]]
    ) -> None:
        self.module, self.patterns = module, patterns
        self.source = _described(checkpoint.source)
        own = module.state_dict(keep_vars=True)
        self.model_tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, torch.Tensor)}
        lazy = [name for name, tensor in self.model_tensors.items() if nn.parameter.is_lazy(tensor)]
        if lazy:
            raise CheckpointError(f"{list_names(lazy)} have no shape yet: run a batch through the model first.")
        adapters = self._leave_out_added(checkpoint.state_dict)
        tensors = _with_names_of_header(checkpoint, self.model_tensors)
        extra = {name: value for name, value in checkpoint.state_dict.items() if name.endswith("_extra_state")}
        extra = {new: extra[old] for old, new in strip_wrappers(extra).items() if new is not None}
        tensors, normed = other_forms.normed_as_in(tensors, self.model_tensors)
        self._unread = [
            f"{place.location} is made by {place.name}, which is not read: save a plain tensor (tensor.to_dense())"
            for place in checkpoint.placeholders
            if place.location.startswith(checkpoint.key) and re.match("torch.*(_rebuild_|Tensor)", place.name)
        ]
        self.rules = apply_rules(tensors, rules, self.model_tensors)
        self.alignment, self.loaded, self._aliases, notes = find_tensors(
            self.model_tensors, self.rules, patterns.get("allow_unexpected", ()), patterns.get("accept", ())
        )
        names = self.alignment.clean_names_in_file
        file = {name: self.rules.tensors[self.alignment.name_in_file(name)] for name in names}
        codes = other_forms.find_codes(self.alignment, file, self.model_tensors, checkpoint.metadata)
        self._codes = other_forms.describe_codes(codes, file) if codes else ""
        self._leave_out_other_kinds()
        self._notes = [*adapters, *normed, *notes, *self._unread[:1]]
        widened = [name for name in self.loaded if other_forms.is_widened(self.loaded[name], self.model_tensors[name])]
        if widened:
            self._notes.append(f"{list_names(widened)} have 8 bits in the file, and are loaded with that precision")
        self._loads_codes = any(not codes.keys().isdisjoint(match.ruled) for match in self.alignment.matches)
        self._resize()
        self.tensors = self.loaded | extra

    def _leave_out_added(self, tensors: Collection[str]) -> list[str]:
        """Leave out the parameters of LoRA and adapters, if the file has none; return what should be said."""
        added = added_names(self.module) | names_added_by_peft(self.module)
        modules = {f"{name.rpartition('.')[0].rpartition('.')[2]}." for name in added}
        if not added or any(module in name for name in tensors for module in modules):
            return []
        self.model_tensors = {n: tensor for n, tensor in self.model_tensors.items() if n not in added}
        return [f"{len(added)} tensors of adapters keep their values"]

    def _leave_out_other_kinds(self) -> None:
        """Leave out the tensors of integers that would become numbers of another kind, such as quantized weights."""
        others: dict[str, Mismatch] = {}
        for match in self.alignment.matches:
            for name in match.targets:
                tensors = self.loaded[name], self.model_tensors[name]
                shape, own_shape = (tuple(tensor.shape) for tensor in tensors)
                kinds = [_number_kind(tensor) for tensor in tensors]
                if kinds[0] != kinds[1] and not is_computed(name, own_shape):
                    file_kind, own_kind = map(_describe_kind, tensors)
                    others[name] = Mismatch(match.ruled[0], shape, name, own_shape, (file_kind, own_kind))
        self.loaded = {name: tensor for name, tensor in self.loaded.items() if name not in others}
        self.alignment = replace(
            self.alignment,
            matches=tuple(match for match in self.alignment.matches if others.keys().isdisjoint(match.targets)),
            mismatched=(*others.values(), *self.alignment.mismatched),
        )

    def _resize(self) -> None:
        """Resize position embeddings; other tensors whose shapes differ keep their values."""
        matches, kept, resized = list(self.alignment.matches), [], []
        for mismatch in self.alignment.mismatched:
            if mismatch.kinds is not None or not self._is_matched("interpolate", mismatch.target):
                kept.append(mismatch)
                continue
            tensor = self.rules.tensors[self.alignment.name_in_file(mismatch.source)]
            self.loaded[mismatch.target] = other_forms.resize_positions(mismatch, tensor, self.module)
            resized.append(f"{mismatch.target} was resized from {format_shape(mismatch.source_shape)}")
            match = Match((mismatch.source,), (mismatch.target,), reason="positions, resized to their new number")
            matches.append(match.with_names_in_file(self.rules.ruled))
        if resized:
            self._notes.append(list_names(resized))
        self.alignment = replace(self.alignment, matches=tuple(matches), mismatched=tuple(kept))

    @property
    def report(self) -> LoadReport:
        """What the plan does."""
        found = self.alignment
        return LoadReport(
            loaded=len(self.loaded) + sum(1 for first in self._aliases.values() if first in self.loaded),
            total=len(self.model_tensors),
            renamed=found.renamed,
            missing=list(found.missing),
            unexpected=list(found.unexpected),
            mismatched=[mismatch.target for mismatch in found.mismatched],
            diagnosis="; ".join([found.diagnosis.rstrip("."), *self._notes]) + ".",
            alignment=found,
        )

    def check(self) -> None:
        """Check that what would load fits the model, and that what does not fit is allowed.

        Raises:
            AmbiguousAlignmentError: If tensors are missing because they could be matched in several ways.
            NothingLoadedError: If no tensor would load.
            CheckpointError: If something that does not fit is not allowed, has no values, or differs in tied tensors.
        """
        self._check_names_and_shapes()
        self._check_values()
        self._check_tied()

    def _check_names_and_shapes(self) -> None:
        found, model = self.alignment, type(self.module).__name__
        wrong = [m for m in found.mismatched if not self._is_matched("allow_mismatched", m.target)]
        ruled = [mismatch for mismatch in wrong if mismatch.source in self.rules.pinned]
        if ruled:
            raise CheckpointError(
                f"{self.source} does not fit {model}, which was not modified: rules lead to tensors of other shapes or "
                f"kinds: {list_names(map(str, ruled))}. Correct the rules; a RemapRule can transpose and reshape."
            )
        missing = [name for name in found.lacking if not self._is_matched("allow_missing", name)]
        unexpected = [name for name in found.unexpected if not self._is_matched("allow_unexpected", name)]
        reason = self._codes if self._loads_codes or wrong or missing or unexpected else ""
        if missing:
            reason = other_forms.describe_computed(unexpected, missing) or reason
            reason = f"{self._unread[0]}." if self._unread else reason
        if reason:
            raise CheckpointError(f"{self.source} does not fit {model}, which was not modified. {reason}")
        if ambiguous_cases(found, missing):
            raise AmbiguousAlignmentError(
                f"{self.source} does not load into {model}: {describe_ambiguity(found, missing)}"
            )
        suggested = suggestions_for(found, missing)
        if suggested:
            raise AmbiguousAlignmentError(
                f"{self.source} does not load into {model}, which was not modified: "
                f"{describe_suggestions(found, suggested)}."
            )
        # What a model computes for itself may match a pattern
        in_model = [name for name in found.names_in_model if name not in found.computed]
        matched = [name for match in found.matches for name in match.ruled]
        positions = [m.target for m in wrong if m.kinds is None and re.search(r"pos|wpe(\.|$)", m.target)]
        in_file = [*matched, *(mismatch.source for mismatch in found.mismatched), *found.unexpected]
        problems = [
            *_problem(
                "of other shapes or kinds", {m.target: m for m in wrong}, "allow_mismatched", in_model, positions
            ),
            *_problem("missing in the file", {name: name for name in missing}, "allow_missing", in_model),
            *_problem("left over in the file", {name: name for name in unexpected}, "allow_unexpected", in_file),
        ]
        parts = found.proposals.for_parts() if missing and self.rules.search else ""
        rule = found.proposals.for_the_rest() if (missing or wrong) and not parts else None
        proposed = f"if one of them is another's, {in_words(rule)}" if rule else parts
        reordered = found.proposals.with_other_orders() if missing else ""
        ordered = [reordered, proposed, *problems] if reordered or parts else [*problems, proposed]
        problems = [*filter(None, ordered)]
        if not self.loaded:
            others = proposed or "".join(problems[:1] if wrong else [])
            others = f" {others[:1].upper()}{others[1:]}." if others else ""
            raise NothingLoadedError(f"No tensor of {self.source} fits {model}: {found.diagnosis}{others}")
        if problems:
            remedy = ""
            if any(".lora_" in f".{name}" for name in unexpected):
                remedy = "The file has LoRA weights: call add_lora(model) first, as in training. "
            if any("(torch.sparse" in kind for m in wrong for kind in m.kinds or ()):
                remedy += "A sparse tensor and a dense one do not fit: make both dense (tensor.to_dense()). "
            raise CheckpointError(
                f"{self.source} does not fit {model}, which was not modified. {remedy}{'; '.join(problems)}. "
                f"{len(self.loaded)} of {found.total} tensors would load: {found.diagnosis}"
            )

    def _check_values(self) -> None:
        without = [name for name, tensor in self.loaded.items() if tensor.is_meta]
        if without:
            raise CheckpointError(
                f"{self.source} has no values for {list_names(without)}: its tensors are on the meta device. Nothing "
                "was loaded. Save the model once it has values, and read the file without map_location='meta'."
            )

    def _check_tied(self) -> None:
        """Check that the names of one tied tensor get equal values."""
        first: dict[int, str] = {}
        for name in self.loaded:
            other = first.setdefault(id(self.model_tensors[name]), name)
            if other != name and not torch.equal(self.loaded[name], self.loaded[other]):
                raise CheckpointError(
                    f"{other} and {name} are one tensor in the model and two different ones in the checkpoint: untie "
                    "them, or drop one with a rule."
                )

    def _is_matched(self, argument: str, name: str) -> bool:
        """Whether a pattern of an argument matches a name."""
        return any(pattern.matches(name) for pattern in self.patterns.get(argument, ()))


def _number_kind(tensor: torch.Tensor) -> tuple[str, torch.layout]:
    kind = "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integer"
    return kind, tensor.layout


def _describe_kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype) + ("" if tensor.layout == torch.strided else f" ({tensor.layout})")


def _with_names_of_header(checkpoint: Checkpoint, model_names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors with the names that a .safetensors left out and the model has, whatever stands in front of them.

    The header names the tensor that each is tied to.
    """
    tensors = {n: value for n, value in checkpoint.state_dict.items() if isinstance(value, torch.Tensor)}
    header = checkpoint.metadata if checkpoint.kind == "safetensors" else {}
    left_out = {name: tensors[kept] for name, kept in header.items() if isinstance(kept, str) and kept in tensors}
    wanted = [f".{name}" for name in strip_wrappers(model_names).values() if name] if left_out else []
    clean = {name: f".{new}" for name, new in strip_wrappers(left_out).items() if new}
    endings = {name: [own for own in wanted if own.endswith(new) or new.endswith(own)] for name, new in clean.items()}
    return {name: left_out[name] for name, found in endings.items() if found} | tensors


_MOST_PATTERNS = 4  # of one argument that a message shows
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(\w+)")


def _described(source: str) -> str:
    """Return the source of a checkpoint; of one shard of several, with the name of the index that lists them all."""
    name = source.rpartition("/")[2]
    shard = _SHARD.fullmatch(name)
    if not shard or int(shard[3]) < 2:
        return source or "the checkpoint"
    index = f"{source.removesuffix(name)}{shard[1]}.{shard[4]}.index.json"
    return f"{name} (shard {int(shard[2])} of {int(shard[3])} of a model: give the index of all shards, {index})"


def _problem(
    what: str, tensors: Mapping[str, object], argument: str, known: Sequence[str], resizable: Sequence[str] = ()
) -> list[str]:
    """Return the sentence about tensors (name -> text to show), with the patterns that allow them."""
    if not tensors:
        return []
    allowed = f"{_patterns_for(argument, [*tensors], known)} allows that"
    if resizable:
        allowed += f", {_patterns_for('interpolate', resizable, known)} resizes positions"
    count = "1 tensor is" if len(tensors) == 1 else f"{len(tensors)} tensors are"
    texts = [*map(str, tensors.values())]
    return [f"{count} {what}: {list_names(texts, min(_fitting(texts, 180), 4))} ({allowed})"]


def _patterns_for(argument: str, names: Sequence[str], known: Sequence[str]) -> str:
    """Return an argument with patterns for names, a few of them if there are many."""
    patterns = suggested_patterns(names, known, most=_MOST_PATTERNS)
    shown = _fitting(patterns, 120)
    left = {name for name in names if not any(Pattern(pattern).matches(name) for pattern in patterns[:shown])}
    more = f" with patterns for {len(left):,} more" if left else ""
    return f"{argument}={patterns[:shown]}{more}"


def _fitting(texts: Sequence[str], width: int) -> int:
    """Return how many texts have at most so many characters together, at least one."""
    return max(sum(length <= width for length in accumulate(map(len, texts))), 1)
