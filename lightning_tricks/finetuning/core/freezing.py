"""Freezing and unfreezing of parameters by pattern, and what of a model trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.patterns import Pattern, strip_compile_prefix
from lightning_tricks.finetuning.core.frozen_norms import frozen_norms, held_norms, hold_norms_, release_norms_


@dataclass(frozen=True)
class ParameterCount:
    """A number of parameter tensors and of the values in them; those that are tied count once.

    Attributes:
        tensors: The number of tensors.
        values: The number of values; parameters that are not initialized have none yet.
    """

    tensors: int
    values: int

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> ParameterCount:
        """Count parameters."""
        sizes = [0 if is_lazy(parameter) else parameter.numel() for parameter in dict.fromkeys(parameters)]
        return cls(len(sizes), sum(sizes))

    def __str__(self) -> str:
        return f"{self.values:,} values in {self.tensors:,} tensor{'s' * (self.tensors != 1)}"


@dataclass(frozen=True)
class TrainableSummary:
    """What of a model trains. Printed, it is one line, and one for each child.

    Attributes:
        trainable: The parameters that require a gradient.
        total: All parameters.
        children: Name of a child -> its own summary; parameters of the model itself have the name "".
    """

    trainable: ParameterCount
    total: ParameterCount
    children: dict[str, TrainableSummary]

    def __str__(self) -> str:
        share = 100 * self.trainable.values / max(1, self.total.values)
        line = (
            f"trainable: {self.trainable.values:,} of {self.total.values:,} values ({share:.2f} %) "
            f"in {self.trainable.tensors:,} of {self.total.tensors:,} tensors"
        )
        return "\n".join([line, *(f"  {name or '(itself)'}: {child}" for name, child in self.children.items())])


def freeze_(module: nn.Module, *patterns: str, norm: bool = True) -> ParameterCount:
    """Freeze the parameters whose names match one of the patterns: no gradient, and none left over from before.

    An optimizer leaves a parameter without a gradient as it is, whatever its momentum and weight decay are.

    Args:
        module: The module.
        patterns: Globs over qualified names (`backbone.*`) or, with the prefix `re:`, regular expressions. None means
            all parameters.
        norm: Whether normalisation with running statistics, such as BatchNorm, is kept in evaluation mode where its
            parameters are frozen: `train()` does not wake it, and its statistics stay as they are, until `unfreeze_`.
            Convert to SyncBatchNorm before, as that makes new modules.

    Returns:
        The number of parameters that match; a tied parameter matches by any of its names, and counts once.

    Raises:
        ValueError: If a pattern matches no parameter.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> print(freeze_(model, "0.*", "1.*"))
        15 values in 4 tensors
        >>> model.train()[1].weight.requires_grad
        False
    """
    matched = match_parameters(module, patterns or ("*",))
    for parameter in matched:
        parameter.requires_grad_(False)
        parameter.grad = None
    if norm:
        hold_norms_(module, frozen_norms(module))
    return ParameterCount.of(matched)


def unfreeze_(module: nn.Module, *patterns: str) -> ParameterCount:
    """Unfreeze the parameters whose names match one of the patterns, and wake the normalisation that `freeze_` held.

    Args:
        module: The module.
        patterns: As in `freeze_`.

    Returns:
        The number of parameters that match, without those that hold whole numbers, which cannot be trained.

    Raises:
        ValueError: If a pattern matches no parameter.

    Examples:
        >>> model = nn.Linear(2, 3).requires_grad_(False)
        >>> unfreeze_(model, "bias")
        ParameterCount(tensors=1, values=3)
    """
    matched = [parameter for parameter in match_parameters(module, patterns or ("*",)) if can_train(parameter)]
    for parameter in matched:
        parameter.requires_grad_(True)
    release_norms_(module, set(held_norms(module)) - set(frozen_norms(module)))
    return ParameterCount.of(matched)


def trainable_summary(model: nn.Module) -> TrainableSummary:
    """Count what of a model trains, as a whole and for each child.

    Args:
        model: The model. Parameters that several children share count in each of them, and once in the whole.

    Returns:
        The counts.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
        >>> print(trainable_summary(model))
        trainable: 4 of 13 values (30.77 %) in 2 of 4 tensors
          0: trainable: 0 of 9 values (0.00 %) in 0 of 2 tensors
          1: trainable: 4 of 4 values (100.00 %) in 2 of 2 tensors
    """
    parts = {"": list(model.parameters(recurse=False))}
    parts |= {name: list(child.parameters()) for name, child in model.named_children()}
    children = {name: _summary(parameters) for name, parameters in parts.items() if parameters}
    return _summary(model.parameters(), children)


def _summary(parameters: Iterable[Tensor], children: dict[str, TrainableSummary] | None = None) -> TrainableSummary:
    parameters = list(parameters)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return TrainableSummary(ParameterCount.of(trainable), ParameterCount.of(parameters), children or {})


def can_train(parameter: Tensor) -> bool:
    """Whether a parameter can require a gradient: quantized ones, which hold whole numbers, cannot."""
    return parameter.is_floating_point() or parameter.is_complex()


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # FSDP1 and activation checkpointing


def names_of_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter, told apart by identity, with all its qualified names, of which tied ones have several.

    The names are those without the prefixes that wrappers insert.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names.setdefault(parameter, []).append(strip_compile_prefix(name))
    return names


def match_parameters(module: nn.Module, patterns: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters, each once, of which a name matches one of the patterns.

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    names = names_of_parameters(module)
    matched: dict[nn.Parameter, None] = {}
    for text in patterns:
        matched |= dict.fromkeys(match_pattern(text, names))
    return [parameter for parameter in names if parameter in matched]


def match_pattern(text: str, names: dict[nn.Parameter, list[str]], argument: str = "pattern") -> list[nn.Parameter]:
    """Return the parameters that a pattern matches by one of their names.

    Args:
        text: The pattern.
        names: What `names_of_parameters` returned.
        argument: What the pattern belongs to, for the error message.

    Raises:
        ValueError: If it matches none; the message suggests a similar one.
    """
    pattern = Pattern(text)
    matched = [parameter for parameter, own in names.items() if any(map(pattern.matches, own))]
    if not matched:
        known = [name for own in names.values() for name in own]
        parts = dict.fromkeys(f"{name[:end]}.*" for name in known for end in _dots(name))
        raise ValueError(
            f"{argument} {text!r} matches none of the {len(names):,} parameters of the model."
            f"{did_you_mean(text, [*parts, *known])}"
        )
    return matched


def _dots(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]
