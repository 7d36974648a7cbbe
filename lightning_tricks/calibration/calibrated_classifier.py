"""`calibrate`, the held-out rows and the table of it, and `CalibratedClassifier`, which applies it to any module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lightning_tricks._lightning_compat.loaders import lightning_module_in, transferred_batches
from lightning_tricks._shared import calibration as shared
from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.dry_run.model_copy import unwrap_model
from lightning_tricks._shared.dry_run.shared_state import evaluated_unchanged
from lightning_tricks._shared.fitting_table import FittingTable
from lightning_tricks._shared.modules import explained_arguments
from lightning_tricks._shared.tensors import gather_objects, outside_inference_mode
from lightning_tricks._shared.text import list_names, render_text
from lightning_tricks._torch_compat.tensors import tree_map_only
from lightning_tricks.calibration.functional import fit_calibration

_LABELS = ("target", "targets", "label", "labels", "y")
_TITLES = {"nll": "NLL", "ece": "ECE, 15 bins", "adaptive_ece": "adaptive ECE, 15 bins", "brier": "Brier score"}


class CalibratedClassifier(nn.Module):
    """A classifier whose outputs are calibrated probabilities, once `calibrate` was called with it.

    Its state dict contains the module and the calibration; a new `CalibratedClassifier(Net())` loads both. If the
    module has its own `Calibration`, this one is used.

    Args:
        module: Any module that returns logits or probabilities, (B, C), or (B,) or (B, 1) for a binary classifier.

    Raises:
        TypeError: If it is not a module.

    Examples:
        >>> net = CalibratedClassifier(nn.Linear(4, 3))
        >>> net.calibration.set_values(temperature=torch.tensor(1.5))
        >>> net(torch.randn(2, 4)).shape
        torch.Size([2, 3])
    """

    outputs_kind = "probabilities"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {module!r} ({type(module).__name__}).")
        self.module = module
        self.training = module.training
        if shared.calibration_of(unwrap_model(module)) is None:
            place = next(chain(module.parameters(), module.buffers()), torch.empty(0))
            self.calibration = shared.Calibration().to(place.device)

    def uncalibrated_logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what `calibrate` maps to probabilities: the outputs of the module, such as logits."""
        return found_logits(getattr(unwrap_model(self.module), "uncalibrated_logits", self.module)(*args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return calibrated probabilities in the shape of the module's outputs.

        Raises:
            RuntimeError: If it is not calibrated.
        """
        probabilities: Tensor = _calibration_in(self)(self.uncalibrated_logits(*args, **kwargs))
        return probabilities


@dataclass(frozen=True)
class CalibrationTable:
    """The effect of `calibrate`, measured on the rows that it was fitted to.

    Attributes:
        method: The method.
        rows: The number of held-out rows.
        before: `nll` (negative log-likelihood, nats), `ece` (expected calibration error, 15 bins), `adaptive_ece` and
            `brier` (Brier score) without the calibration.
        after: The same scores with the calibration.
        module: The calibrated module: the given one if it keeps the calibration, else a `CalibratedClassifier`.
        temperature: The divisor of the logits; None for other methods.
    """

    method: str
    rows: int
    before: dict[str, float]
    after: dict[str, float]
    module: nn.Module = field(repr=False, compare=False)
    temperature: float | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return method, rows and values as plain values."""
        return {"method": self.method, "rows": self.rows, "before": dict(self.before), "after": dict(self.after)}

    def __rich__(self) -> FittingTable:
        """Return the table."""
        note = "" if self.temperature is None else f"T = {self.temperature:.4g}. "
        table = FittingTable("", "before", "after", title=f"Calibration: {self.method}")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, title in _TITLES.items():
            table.add_row(title, f"{self.before[name]:.4f}", f"{self.after[name]:.4f}")
        table.notes = f"{note}Measured on the {self.rows:,} held-out rows that it was fitted to."
        return table

    def __str__(self) -> str:
        return render_text(self)


def calibrate(
    module: nn.Module,
    loader: Iterable[Any],
    method: Literal["temperature", "vector", "isotonic"] = "temperature",
    *,
    outputs: Literal["logits", "probabilities"] | None = None,
) -> CalibrationTable:
    """Fit a map from a classifier's outputs to calibrated probabilities, on held-out data.

    Weights, buffers, modes and random state of the module do not change, even after an error. An ensemble keeps the
    calibration of its combined prediction, and applies it in `predict_uncertainty(x)` and in
    `ensemble(x, calibrated=True)`. A module with `self.calibration = Calibration()` keeps it there. For any other
    module, the `module` of the result is a `CalibratedClassifier` around it. In the state dict, and so in checkpoints,
    the calibration is a few plain tensors. An earlier calibration is replaced, unless an error is raised.

    Args:
        module: An ensemble, or a LightningModule or module that returns logits or probabilities, (B, C), or (B,) or
            (B, 1) for a binary classifier.
        loader: Batches (x, y), (x1, x2, ..., y) or a dict with the labels as `target`, `label`, `labels` or `y`, of
            data that the module was not trained on. Labels are class indices (B,), or probabilities (B, C). With a
            `DistributedSampler`, all ranks must call it, and get the same result.
        method: "temperature" divides logits by one number, which keeps the predicted class; "vector" scales
            and shifts the logit of each class; "isotonic" maps the probability of each class by a non-decreasing
            function, and normalizes the result to the sum 1.
        outputs: What the module returns, "logits" or "probabilities"; the logarithms of probabilities are logits. Leave
            it None for an ensemble, and for a module with outputs below 0 or above 1, which must be logits.

    Returns:
        The scores before and after, and the calibrated module.

    Raises:
        TypeError: If the module, a batch or an output is of the wrong kind.
        ValueError: If the method is unknown, the data are wrong or do not determine a calibration, or all outputs are
            between 0 and 1 and `outputs` is None.

    Source: Guo et al., arXiv 1706.04599; Zadrozny and Elkan, KDD 2002.

    Examples:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits = torch.randn(2000, 3, generator=generator)
        >>> labels = torch.multinomial(logits.softmax(1), 1, generator=generator)
        >>> table = calibrate(nn.Identity(), [(5 * logits, labels)])  # of a model that is five times too sure
        >>> round(table.module.calibration.temperature.item()), table.after["ece"] < 0.1 * table.before["ece"]
        (5, True)
    """
    check_choice("method", method, shared.METHODS)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r} ({type(module).__name__}).")
    inner = unwrap_model(module)
    is_owner = isinstance(inner, CalibratedClassifier) or shared.calibration_of(inner) is not None
    owner = inner if is_owner else CalibratedClassifier(inner)
    model = unwrap_model(owner.module) if isinstance(owner, CalibratedClassifier) else owner
    kind = shared.stated_outputs(model, outputs)
    if hasattr(model, "uncalibrated_logits"):
        kind = "logits"  # which are those of the probabilities that it returns
    with outside_inference_mode():
        logits, target = held_out_rows(owner, loader, kind)
        values = fit_calibration(method, logits, target)
        fitted = shared.Calibration()
        fitted.set_values(**values)
        before, after = (
            {name: value.item() for name, value in shared.classification_scores(probabilities, target).items()}
            for probabilities in (logits.softmax(1), fitted(logits))
        )
        if kind == "probabilities":
            values["from_probabilities"] = torch.ones(())
        _calibration_in(owner).set_values(**values)
    temperature = None if fitted.temperature is None else fitted.temperature.item()
    return CalibrationTable(method, len(logits), before, after, owner, temperature)


def calibration_scores(probabilities: Tensor, target: Tensor) -> dict[str, float]:
    """Measure probabilities, for example on test data that a calibration has not seen.

    Args:
        probabilities: (N, C), or (N,) or (N, 1) for the probability of class 1.
        target: Class indices (N,), or probabilities (N, C).

    Returns:
        `nll` (nats), `ece` and `adaptive_ece` (15 bins, 0 to 1) and `brier` (0 to 2; with two classes 0 to 1).

    Raises:
        ValueError: If the values are not probabilities, the target does not fit, or there are no rows.

    Examples:
        >>> calibration_scores(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([1, 0]))["brier"]
        0.125
    """
    probabilities, target = torch.as_tensor(probabilities), torch.as_tensor(target)
    if not len(probabilities) or len(probabilities) != len(target):
        raise ValueError(f"There must be a label for each row, got {len(probabilities)} rows and {len(target)} labels.")
    columns = shared.as_columns(probabilities.detach().cpu().double())
    if columns.shape != probabilities.shape:
        columns[:, 0] = 1 - columns[:, 1]
    if not shared.are_probabilities(columns).all():
        found = f"{probabilities.min():.3g} to {probabilities.max():.3g}: call softmax or sigmoid on logits"
        raise ValueError(f"The score needs probabilities, from 0 to 1 and with the sum 1 in each row, got {found}.")
    labels = target_probabilities(target.detach().cpu(), probabilities)
    return {name: value.item() for name, value in shared.classification_scores(columns, labels).items()}


def _calibration_in(owner: Any) -> shared.Calibration:
    """Return the calibration that a module applies: its own, or that of the module that it wraps."""
    found = shared.calibration_of(owner)
    return _calibration_in(unwrap_model(owner.module)) if found is None else found


def held_out_rows(module: nn.Module, loader: Iterable[Any], outputs: str | None = None) -> tuple[Tensor, Tensor]:
    """Run a module in evaluation mode, and return logits and labels of all rows; the module stays as it is.

    The rows of a `DistributedSampler` are gathered from all ranks, without those that it repeats.

    Args:
        module: Returns logits or probabilities, (B, C), or (B,) or (B, 1) if it is binary; if it has a method
            `uncalibrated_logits`, that does.
        loader: Batches (x, y), (x1, x2, ..., y), or a dict with the labels as `target`, `label`, `labels` or `y`.
        outputs: What the module returns, "logits" or "probabilities"; None if nobody has said it.

    Returns:
        Logits, or logarithms of probabilities, and probabilities of the labels, (N, C) each, float64, on the CPU.

    Raises:
        TypeError: If a batch or an output is of another kind.
        ValueError: If outputs are NaN, or may be either and that was not said, or labels do not fit them.
    """
    logits_of = getattr(module, "uncalibrated_logits", module)
    place = next(chain(module.parameters(), module.buffers()), torch.empty(0, device="cpu"))
    parts = []
    with evaluated_unchanged(module, loader):
        for number, batch in enumerate(transferred_batches(lightning_module_in(module), loader, place.device)):
            args, kwargs, target = tree_map_only(np.ndarray, torch.as_tensor, _split(batch))
            args, kwargs = tree_map_only(Tensor, lambda x: _as_input(x, place), (args, kwargs))
            with explained_arguments():
                logits = found_logits(logits_of(*args, **kwargs))
            try:
                target = torch.as_tensor(target)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"labels must be numbers, class indices or probabilities, got {target!r:.99}."
                ) from error
            if not 1 <= logits.ndim <= 2 or not target.ndim or len(logits) != len(target):
                given = f"logits {tuple(logits.shape)} and labels {tuple(target.shape)}"
                raise ValueError(f"Batch {number} has {given}, but must have logits (B, C) and a label for each row.")
            parts.append((logits.cpu().double(), target_probabilities(target.cpu(), logits)))
    if not sum(len(rows) for rows, _ in parts):
        raise ValueError("The loader has no rows, so there is nothing to calibrate with: give it held-out data.")
    found, target = (torch.cat(part) for part in zip(*parts, strict=True))
    found, target = _of_all_ranks(found, target, loader)
    logits = shared.as_logits(found, outputs)
    shared.check_outputs(outputs, shared.are_between_0_and_1(found), shared.are_probabilities(logits.exp()))
    if (wrong := ~logits.amax(1).isfinite()).any():
        rows = f"{int(wrong.sum())} of {len(logits)} held-out rows, the first is row {int(wrong.nonzero()[0])}"
        raise ValueError(f"The logits are NaN or infinite in {rows}: look for NaN in inputs, or an overflow in fp16.")
    return logits, target


def found_logits(output: Any) -> Tensor:
    """Return the logits in what a module returned, or raise an error if it has none."""
    found = shared.logits_in(output)
    if not isinstance(found, Tensor):
        raise TypeError(f"the module must return a tensor of logits, got {type(output).__name__}: wrap it to do so.")
    return found


def _split(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the positional and the keyword arguments of the module, and the labels."""
    if isinstance(batch, Mapping):
        labels = [name for name in _LABELS if name in batch]
        inputs = {name: value for name, value in batch.items() if name not in labels}
        if len(labels) == 1 and inputs:
            args = tuple(inputs.values()) if len(inputs) == 1 else ()  # one input, whatever its name
            return args, {} if args else inputs, batch[labels[0]]
        needed = f"inputs and the labels as one of {', '.join(_LABELS)}"
        raise TypeError(f"a batch that is a dict needs {needed}, got {list_names(map(str, batch))}.")
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return tuple(batch[:-1]), {}, batch[-1]
    raise TypeError(f"a batch must be (x, y), (x1, x2, ..., y) or a dict, got {type(batch).__name__}.")


def _as_input(x: Tensor, place: Tensor) -> Tensor:
    both = x.is_floating_point() and place.is_floating_point()
    return x.to(place.device, place.dtype if both else x.dtype)


def target_probabilities(target: Tensor, logits: Tensor) -> Tensor:
    """Return labels as probabilities, (B, C), for the logits that belong to them."""
    one = logits.ndim == 1 or logits.shape[1] == 1
    classes = 2 if one else logits.shape[1]
    target = target.squeeze(1) if target.ndim == 2 and target.shape[1] == 1 else target
    if target.ndim == 1 and one and target.is_floating_point():
        target = torch.stack([1 - target, target], 1)
    if target.ndim == 2 and target.shape[1] == classes:
        found = target.double()
        if shared.are_probabilities(found).all():
            return found / found.sum(1, keepdim=True)
        raise ValueError(
            "Labels that are probabilities must be at least 0, and have the sum 1 in each row; calibrate a multi-label "
            "classifier one label at a time."
        )
    if target.ndim != 1 or target.is_floating_point():
        given = f"{tuple(target.shape)} {str(target.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"Labels must be class indices (B,), such as int64, or probabilities (B, {classes}), got {given}."
        )
    if len(wrong := target[(target < 0) | (target >= classes)]):
        remedy = "correct it, or leave such rows out of the loader"
        raise ValueError(f"Label {int(wrong[0])} is not one of the {classes} classes 0 to {classes - 1}: {remedy}.")
    return nn.functional.one_hot(target.long(), classes).double()


def _of_all_ranks(logits: Tensor, target: Tensor, loader: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks in the order of a DistributedSampler; other loaders give each rank all rows."""
    owners = (loader, getattr(loader, "batch_sampler", None))
    samplers = (found for owner in owners if isinstance(found := getattr(owner, "sampler", None), DistributedSampler))
    sampler = next(samplers, None)
    if sampler is None or sampler.num_replicas == 1:
        return logits, target
    size = len(sampler.dataset)  # type: ignore[arg-type]
    rows = torch.arange(len(logits), device="cpu") * sampler.num_replicas + sampler.rank
    ranks = gather_objects((rows, logits, target))
    places, logits, target = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    order = places.argsort()[: int((places < size).sum())]
    return logits[order], target[order]
