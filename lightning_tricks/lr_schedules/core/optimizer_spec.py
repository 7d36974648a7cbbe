"""The description of an optimizer, for code and for YAML, which is checked when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_tricks._shared.checks import (
    check_choice,
    check_not_negative,
    check_number,
    check_spec,
    did_you_mean,
    suggests_argument_names,
)
from lightning_tricks._shared.patterns import Pattern, as_patterns

NO_DECAY_WORDS = ("bias", "norm")
_TAKE_MATRICES = ("Muon",)
_OWN_FIELDS = ("params", "lr", "weight_decay", "fused")


@suggests_argument_names(" The optimizer's own arguments go into kwargs={...}.")
@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of `torch.optim` and the options of its parameter groups, or several for parts of one model.

    Args:
        name: The class: "AdamW", "SGD", ...
        lr: Base learning rate, > 0.
        weight_decay: >= 0; None for the optimizer's own, such as 0 of SGD, 0.01 of AdamW and 0.1 of Muon.
        no_decay: Parameters without weight decay: "bias" (parameters of this name), "norm" (those of normalization
            layers) and patterns over qualified names.
        layer_decay: Factor of the learning rate from each layer to the one below it, in (0, 1]; None for one rate. For
            the layers, see `layer_of_parameters`.
        groups: Pattern over qualified names -> options of the optimizer, such as `{"backbone.*": {"lr": 1e-4}}`. The
            first match counts; parameters exempt by `no_decay` stay exempt.
        fused: Whether to use the fused implementation; "auto" uses it on CUDA, unless the Trainer's `gradient_clip_val`
            is set, which AMP refuses with it.
        kwargs: Other arguments of the optimizer, such as `{"momentum": 0.9}`.
        only: Patterns over qualified names of the parameters that this optimizer steps; None for all. Muon, which takes
            matrices only, needs them, and leaves what they name and is no matrix to `rest`.
        rest: The optimizer of all other parameters, which may have an `only` and a `rest` itself. A `CombinedOptimizer`
            then steps all of them.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a name is unknown or a value out of range.

    Examples:
        >>> OptimizerSpec("SGD", lr=0.1, weight_decay=5e-4, kwargs={"momentum": 0.9}).name
        'SGD'
        >>> spec = OptimizerSpec("SGD", lr=0.1, only=["blocks.*.weight"], rest=OptimizerSpec("AdamW", lr=3e-4))
        >>> [part.name for part in spec.chain]
        ['SGD', 'AdamW']
    """

    name: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float | None = None
    no_decay: Sequence[str] = ("bias", "norm")
    layer_decay: float | None = None
    groups: dict[str, dict[str, Any]] | None = None
    fused: bool | Literal["auto"] = "auto"
    kwargs: dict[str, Any] | None = None
    only: Sequence[str] | None = None
    rest: OptimizerSpec | None = None

    def __post_init__(self) -> None:
        known = list(inspect.signature(self.optimizer()).parameters)
        check_number("lr", self.lr, above=0, at_most=1e9)
        if check_not_negative("weight_decay", self.weight_decay or 0) and "weight_decay" not in known:
            raise ValueError(f"{self.name} has no weight decay: leave out weight_decay={self.weight_decay!r}.")
        if self.layer_decay is not None:
            check_number("layer_decay", self.layer_decay, above=0, at_most=1)
        if self.fused not in (True, False, "auto"):
            raise ValueError(f'fused must be True, False or "auto", got {self.fused!r}.')
        if self.fused is True and "fused" not in known:
            raise ValueError(f'{self.name} has no fused implementation: set fused="auto" or False, got True.')
        if isinstance(self.no_decay, str):
            raise TypeError(f"no_decay must be a list of words and patterns, got the string {self.no_decay!r}.")
        for pattern in (*self.no_decay, *(self.groups or ())):
            Pattern(pattern)
        object.__setattr__(self, "no_decay", tuple(self.no_decay))
        self._check_options("kwargs", self.kwargs or {}, [name for name in known if name not in _OWN_FIELDS])
        for pattern, options in (self.groups or {}).items():
            name = f"groups[{pattern!r}]"
            self._check_options(name, options, [option for option in known if option not in ("params", "fused")])
            if "lr" in options:
                check_number(f"{name}['lr']", options["lr"], above=0, at_most=1e9)
            check_not_negative(f"{name}['weight_decay']", options.get("weight_decay", 0))
        if self.name == "LBFGS" and (self.groups or self.layer_decay is not None):
            given = f"groups={self.groups!r}" if self.groups else f"layer_decay={self.layer_decay!r}"
            raise ValueError(f"LBFGS takes one group of parameters, got {given}: leave it out.")

        if self.only is not None:
            object.__setattr__(self, "only", tuple(pattern.text for pattern in as_patterns("only", self.only)))
            if not self.only:
                raise ValueError("only must name the parameters of the optimizer, got no pattern.")
        object.__setattr__(self, "rest", check_spec("rest", self.rest, OptimizerSpec))
        if self.rest is not None and self.only is None and not self.takes_matrices:
            raise ValueError(f"rest={self.rest.name} has nothing to step: name in only=[...] what {self.name} steps.")

    @property
    def chain(self) -> list[OptimizerSpec]:
        """This optimizer, its `rest`, the `rest` of that, and so on."""
        return [self, *(self.rest.chain if self.rest is not None else ())]

    @property
    def takes_matrices(self) -> bool:
        """Whether the optimizer takes matrices alone."""
        return self.name in _TAKE_MATRICES

    @property
    def decay(self) -> float:
        """The given weight decay, or the optimizer's own; 0 for one that has none."""
        own = inspect.signature(self.optimizer()).parameters.get("weight_decay")
        return (own.default if own else 0.0) if self.weight_decay is None else self.weight_decay

    def optimizer(self) -> Any:
        """Return the class.

        Raises:
            ValueError: If torch has no such optimizer.
        """
        import torch
        from torch import optim

        classes = {n: c for n, c in vars(optim).items() if inspect.isclass(c) and issubclass(c, optim.Optimizer)}
        known = sorted(classes.keys() - {"Optimizer"})
        if self.name == "Muon" and self.name not in known:
            raise ValueError(f"Muon needs torch 2.9 or newer, and this is torch {torch.__version__}.")
        return classes[check_choice("OptimizerSpec.name", self.name, known)]

    def _check_options(self, where: str, options: object, known: list[str]) -> None:
        if not isinstance(options, dict):
            raise TypeError(f"{where} must be a dict of options such as {{'{known[0]}': ...}}, got {options!r}.")
        for option in options:
            if option in _OWN_FIELDS and option not in known:
                raise ValueError(f"{where} must not hold {option!r}: it is a field of OptimizerSpec.")
            if option not in known:
                raise ValueError(
                    f"{where}: {self.name} has no {option!r}, it takes {', '.join(known)}.{did_you_mean(option, known)}"
                )
