"""`Calibration`: the map from a classifier's logits to calibrated probabilities, as a part of the classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_choice, check_names
from lightning_tricks._shared.tensors import to_double

METHODS: dict[str, tuple[str, ...]] = {  # the tensors of each, of 0, 1 and 2 dimensions
    "temperature": ("temperature",),
    "vector": ("scale", "bias"),
    "isotonic": ("thresholds", "values"),
}
_NAMES = [*(name for names in METHODS.values() for name in names), "from_probabilities"]


class Calibration(nn.Module):
    """A map, fitted by `calibrate`, from logits or probabilities to calibrated probabilities.

    If a LightningModule sets `self.calibration = Calibration()` in its `__init__`, its checkpoints contain the fitted
    calibration, and a new module loads it from them. Before it is fitted, it adds nothing to the state dict. Its
    numbers are in double precision, whatever the precision of the module.

    Attributes:
        temperature: T, for `softmax(logits / T)`.
        scale: (C,), for `softmax(scale * logits + bias)`.
        bias: (C,).
        thresholds: (C, K), probabilities of each class in ascending order.
        values: (C, K), the shares of rows of the class, with linear interpolation between them.
        from_probabilities: 1, without dimensions, if it was fitted to probabilities, which it then takes; else None.

    Examples:
        >>> calibration = Calibration()
        >>> calibration.set_values(temperature=torch.tensor(2.0))
        >>> calibration(torch.tensor([[0.0, 2.0]])).round(decimals=2)
        tensor([[0.2700, 0.7300]])
    """

    temperature: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    from_probabilities: Tensor | None
    _place: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in _NAMES:
            self.register_buffer(name, None)
        self.register_buffer("_place", torch.empty(0), persistent=False)  # moves with the module

    @property
    def method(self) -> str | None:
        """The method by which it was fitted; None before."""
        return next((method for method, names in METHODS.items() if getattr(self, names[0]) is not None), None)

    def set_values(self, **values: Tensor) -> None:
        """Set the tensors of one method, and clear all others."""
        check_names("set_values", values, _NAMES)
        for name in _NAMES:
            given = values.get(name)
            value = None if given is None else given.detach().cpu().to(torch.float64, copy=True)
            setattr(self, name, None if value is None else placed(value, self._place.device))

    def reset(self) -> None:
        """Forget what was fitted."""
        self.set_values()

    def extra_repr(self) -> str:
        """Return the method."""
        return self.method or "not fitted"

    def forward(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities in the shape of the logits.

        Args:
            logits: (B, C); of a binary classifier also (B,) or (B, 1), which gives the probabilities of class 1. If
                it was fitted to probabilities, these.

        Raises:
            RuntimeError: If it was not fitted.
            ValueError: If it was fitted to another number of classes, or there are more dimensions.
        """
        method = self.method
        if method is None:
            raise RuntimeError("The module is not calibrated: call calibrate(module, loader) with held-out data first.")
        if logits.ndim > 2:
            raise ValueError(f"logits must be (B, C), or (B,), got {tuple(logits.shape)}: flatten all but the classes.")
        columns = as_logits(to_double(logits), None if self.from_probabilities is None else "probabilities")
        first, *others = (getattr(self, name).to(columns) for name in METHODS[method])
        if first.ndim and len(first) != columns.shape[1]:
            raise ValueError(f"The calibration is for {len(first)} classes, but got logits {tuple(logits.shape)}.")
        if method == "temperature":
            found = (columns / first).softmax(-1)
        elif method == "vector":
            found = (columns * first + others[0]).softmax(-1)
        else:
            found = isotonic_probabilities(columns.softmax(-1), first, others[0])
        found = found if found.shape == logits.shape else found[:, 1].view_as(logits)
        return cast(Tensor, found.to(logits.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the module to another device, but not to another precision."""
        self._place = fn(self._place)
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, fn(value) if value.is_meta else placed(value, self._place.device))
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        missing, unexpected, errors = problems
        given = {name: state_dict[prefix + name] for name in _NAMES if prefix + name in state_dict}
        if not given and self.method is not None:
            words = "the weights in the file are not calibrated, so the previous calibration was dropped: load again"
            missing.append(f"{prefix}{METHODS[self.method][0]} ({words}, then call calibrate)")
        unexpected += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in _NAMES]
        if _are_of_one_method(given):
            self.set_values(**given)
        else:
            errors.append(f"{', '.join(prefix + name for name in given)} are not the tensors of one calibration.")


def placed(value: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, in single precision if the device has no double."""
    return (value.float() if device.type == "mps" and value.is_floating_point() else value).to(device)


def _are_of_one_method(given: Mapping[str, Any]) -> bool:
    """Whether values from a file are those of a method, or none."""
    given = {name: value for name, value in given.items() if name != "from_probabilities"}
    shapes = [tuple(value.shape) for value in given.values() if isinstance(value, Tensor) and value.is_floating_point()]
    dims = {names: number for number, names in enumerate(METHODS.values())}.get(tuple(given))
    fits = len(shapes) == len(given) and len({*shapes}) == 1 and len(shapes[0]) == dims and 0 not in shapes[0]
    return fits or not given


def calibration_of(module: nn.Module) -> Calibration | None:
    """Return the `Calibration` that a module has as a direct part, or None."""
    return next((part for part in module.children() if isinstance(part, Calibration)), None)


def prepare_calibrations(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give each `Calibration` in a module the tensors of a file, so that the module has all of their names."""
    for prefix, part in module.named_modules():
        if isinstance(part, Calibration):
            part.set_values(**{name: weights[key] for name in _NAMES if (key := f"{prefix}.{name}") in weights})


def stated_outputs(module: nn.Module, outputs: str | None) -> str | None:
    """Return what a module returns, by its attribute `outputs_kind` or by the caller; None if neither says it.

    Raises:
        ValueError: If they differ, or the caller gives something else than "logits" or "probabilities".
    """
    own = getattr(module, "outputs_kind", None)
    if outputs is not None and own in (None, check_choice("outputs", outputs, ("logits", "probabilities"))):
        return outputs
    if outputs is not None:
        raise ValueError(f"outputs={outputs!r}, but {type(module).__name__} returns {own}: leave outputs out.")
    return own


def check_outputs(outputs: str | None, between: Tensor, sums_to_one: Tensor) -> None:
    """Ask whether rows are logits or probabilities where that was not said and they could be either.

    Args:
        outputs: What was said, or None.
        between: Whether each row is between 0 and 1, (N,).
        sums_to_one: Whether each row is one of probabilities, (N,).

    Raises:
        ValueError: If it has to be said, or rows are no probabilities although they should be.
    """
    if outputs is None and between.all():
        raise ValueError(
            f"All {len(between):,} rows that the module returns are between 0 and 1, so they may be logits or "
            'probabilities. Pass outputs="probabilities" if it ends with softmax or sigmoid, else '
            'outputs="logits".'
        )
    if outputs == "probabilities" and (wrong := int((~sums_to_one).sum())):
        raise ValueError(
            f'outputs="probabilities", but {wrong:,} of the {len(between):,} rows that the module returns are not '
            'probabilities, from 0 to 1 and with the sum 1: pass outputs="logits", or return the output of softmax.'
        )


def logits_in(output: Any) -> Any:
    """Return the attribute or entry `logits` of what a module returned, or else all of it."""
    return output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)


def as_logits(outputs: Tensor, kind: str | None) -> Tensor:
    """Return logits, or the logarithms of "probabilities", as (B, C); one number for each row is that of class 1."""
    columns = as_columns(outputs)
    if kind != "probabilities":
        return columns
    return (columns if columns is outputs else torch.stack([1 - columns[:, 1], columns[:, 1]], 1)).log()


def as_columns(logits: Tensor) -> Tensor:
    """Return logits as (B, C): the one logit of a binary classifier, (B,) or (B, 1), becomes 0 and itself."""
    if logits.ndim == 2 and logits.shape[1] > 1:
        return logits
    one = logits.reshape(-1)
    return torch.stack([torch.zeros_like(one), one], 1)


def isotonic_probabilities(probabilities: Tensor, thresholds: Tensor, values: Tensor) -> Tensor:
    """Map each class by its isotonic regression, and give the classes the sum 1.

    Args:
        probabilities: (B, C).
        thresholds: (C, K), ascending; the last one may repeat.
        values: (C, K).

    Returns:
        Probabilities, (B, C); equal ones where all regressions give 0.

    Source: scikit-learn's `CalibratedClassifierCV(method="isotonic")`.
    """
    given = probabilities.T.contiguous().clamp(thresholds[:, :1], thresholds[:, -1:])
    upper = torch.searchsorted(thresholds.contiguous(), given, right=True).clamp(1, thresholds.shape[1] - 1)
    (x0, x1), (y0, y1) = ([part.gather(1, upper - 1), part.gather(1, upper)] for part in (thresholds, values))
    share = torch.where(x1 > x0, (given - x0) / (x1 - x0), 1.0)
    found = (y0 + share * (y1 - y0)).T
    total = found.sum(1, keepdim=True)
    return torch.where(total == 0, 1 / found.shape[1], found / total)  # NaN stays
