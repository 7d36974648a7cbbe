"""One optimizer that steps several, each on its own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

PART_KEY = "optimizer"  # in a parameter group: the name of the part that steps it


def part_names(kinds: Iterable[str]) -> list[str]:
    """Return a name for each part: its class, and from the second of a class on a number.

    Examples:
        >>> part_names(["Muon", "AdamW", "AdamW"])
        ['Muon', 'AdamW', 'AdamW 2']
    """
    names: list[str] = []
    seen: list[str] = []
    for kind in kinds:
        seen.append(kind)
        names.append(f"{kind} {seen.count(kind)}" if seen.count(kind) > 1 else kind)
    return names


class CombinedOptimizer(Optimizer):
    """Step several optimizers as one, each on its own parameters.

    It has the parameter groups and the state of all its parts, which share them with it, so schedulers, gradient
    clipping, a GradScaler and checkpoints treat it as any other optimizer: weights and states are, bit for bit, those
    of the parts stepped one after another, and a step that is skipped is skipped for all. Each group has the name of
    its part in `group["optimizer"]`, which `add_param_group` requires for a new one. A GradScaler unscales the
    gradients before the step, of fused parts too.

    Args:
        optimizers: The optimizers, none of whose parameters another one has. Their own hooks are called in each step;
            use this optimizer alone from now on, for schedulers and checkpoints as well.

    Attributes:
        parts: The optimizers by name: "Muon", "AdamW", "AdamW 2".

    Raises:
        TypeError: If one is not an optimizer.
        ValueError: If there is none, two share a parameter, or one calls its closure itself (LBFGS) or saves its state
            in a form of its own.

    Examples:
        >>> net = torch.nn.Linear(2, 2)
        >>> parts = [torch.optim.SGD([net.weight], lr=0.1), torch.optim.AdamW([net.bias], lr=0.01)]
        >>> [(group["optimizer"], group["lr"]) for group in CombinedOptimizer(parts).param_groups]
        [('SGD', 0.1), ('AdamW', 0.01)]
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        optimizers = list(optimizers)
        for optimizer in optimizers:
            _check_part(optimizer)
        if not optimizers:
            raise ValueError("CombinedOptimizer needs one optimizer at least, got an empty list.")
        self.parts = dict(zip(part_names(type(one).__name__ for one in optimizers), optimizers, strict=True))
        for name, part in self.parts.items():
            for group in part.param_groups:
                group[PART_KEY] = name
        first, *others = (part.defaults for part in optimizers)
        # what all parts have: OneCycleLR looks here for the momentum that it sets in each group
        defaults = {key: value for key, value in first.items() if all(key in other for other in others)}
        super().__init__([group for part in optimizers for group in part.param_groups], defaults)
        for part in optimizers:
            self.state.update(part.state)  # that of Adagrad is there from the beginning
        self._share()

    def _share(self) -> None:
        """Give the parts their groups and the state, in whose places a checkpoint or a callback may have put others."""
        for name, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group[PART_KEY] == name]
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, and then step each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for part in self.parts.values():
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the part that its entry "optimizer" names.

        Raises:
            ValueError: If it names none.
        """
        name = param_group.get(PART_KEY)
        if name not in self.parts:
            known = " or ".join(map(repr, self.parts))
            raise ValueError(
                f"CombinedOptimizer cannot know which of its parts steps a new group of parameters: give the group "
                f"{PART_KEY!r}: {known}, got {name!r}."
            )
        for option, value in self.parts[name].defaults.items():
            param_group.setdefault(option, value)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = [group.get(PART_KEY) for group in state["param_groups"]]
        own = [group[PART_KEY] for group in getattr(self, "param_groups", state["param_groups"])]
        if saved != own:
            raise ValueError(
                f"the state to load is not one of this CombinedOptimizer: {saved} step its parameter groups, and here "
                f"{own}. Combine the optimizers that it was saved with, in their order."
            )
        super().__setstate__(state)
        self._share()
        for part in self.parts.values():  # some add options that an older version of torch did not save
            part.__setstate__({"state": part.state, "param_groups": part.param_groups})


def _check_part(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"CombinedOptimizer takes a list of torch.optim.Optimizer, got a {type(optimizer).__name__} in it."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    forms = ("state_dict", "load_state_dict")
    if closure is not None and closure.default is closure.empty:
        reason = "its step computes the gradients several times, and moves the weights in between"
    elif isinstance(optimizer, CombinedOptimizer):
        reason = "give its parts themselves"
    elif any(getattr(type(optimizer), form) is not getattr(Optimizer, form) for form in forms):
        reason = "it saves its state in a form of its own"
    else:
        return
    raise ValueError(f"CombinedOptimizer cannot step {type(optimizer).__name__} as one of several: {reason}.")
