"""Whether members give the same at once as one after another, in a step of both on copies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks._shared.dry_run.model_copy import ModelCopier
from lightning_tricks._shared.dry_run.trainer_stub import stub_trainer
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import describe_error
from lightning_tricks._torch_compat.operators import TorchDispatchMode, argument_names
from lightning_tricks.ensembles.core.members import stack_outputs
from lightning_tricks.ensembles.core.same_values import different_attributes, relative_difference, same_or_rows_of
from lightning_tricks.ensembles.core.stacked_layers import StackedLayer

_EXACT, _HALF = 1e-3, 1e-2  # relative to the largest value: layers are run alike, so that next to nothing is off


@dataclass
class Step:
    """The results of a forward and a backward pass of all members.

    Attributes:
        outputs: The outputs, (n, B, ...).
        gradients: Those of each parameter, (n, ...).
        state: The parameters and buffers afterwards, (n, ...).
        changed: The attributes of modules that the pass changed, by name, of each copy that ran.
        modes: What saw the random operations, of each copy that ran.
    """

    outputs: Tensor
    gradients: list[Tensor]
    state: list[Tensor]
    changed: list[dict[str, Any]]
    modes: list[MemberDraws]


def compare_with_loop(stack: Any, inputs: Sequence[Tensor]) -> str | None:
    """Return why members must not run at once, or nothing; None if this batch does not tell.

    Both ways run on copies, with the same random numbers for each member, so that neither the members nor anything else
    is changed. Layers with parameters run member by member in both: only the computations between them can differ.

    Args:
        stack: The `StackedMembers`.
        inputs: Rows of the members one after another, (n x B, ...). If all members have the same rows, they are varied.

    Raises:
        ValueError: If a forward pass changes parameters that are trained.
    """
    n, attempts = len(stack), [inputs]
    if _are_same(inputs, n):
        if len(inputs[0]) == n and not any(value.is_floating_point() for value in inputs):
            return None
        attempts.insert(0, [_varied(value, n) for value in inputs])
    with isolated_rng(), _without_autocast_cache():
        for rows in attempts:
            with suppress(Exception):  # of the members alone: the step itself will raise it for the rows that are given
                alone = _step_of_loop(stack, rows)
                break
        else:
            return None
        if name := _changed_parameter(stack, alone):
            raise ValueError(
                f"the members change {name} in their forward pass, which stacked parameters that are trained do not "
                "allow: give vectorize=False."
            )
        others = random.getstate(), _numpy_state()
        try:
            at_once = _step_at_once(stack, rows, alone.modes[0].has_drawn)
        except Exception as error:
            return f"with stacked layers the model raises {describe_error(error)}"
        drawn = (random.getstate(), _numpy_state()) != others
    return _describe_difference(at_once, alone, n, drawn)


def _step_of_loop(stack: Any, inputs: Sequence[Tensor]) -> Step:
    cut = stack.tensors_by_name()
    rows = zip(*(value.chunk(len(stack)) for value in inputs), strict=True)
    outputs, gradients, state, changed, modes = [], [], [], [], list[MemberDraws]()
    for index, (member, own) in enumerate(zip(stack.skeletons, rows, strict=True)):
        copied, mode = _Copy(stack.in_mode(member), stack.net), MemberDraws([index])
        tensors = {key: _copied(parts[index]) for key, parts in cut.items()}
        modes.append(mode)
        # a pass through the mode takes twice as long: it is left out where the first member draws nothing
        used = mode if modes[0].has_drawn or not index else nullcontext()
        output, found = _pass(copied, used, tensors, own, lambda output: output.unsqueeze(0))
        outputs.append(output.squeeze(0))
        gradients.append(found)
        state.append([tensor.detach() for tensor in tensors.values()])
        changed.append(copied.changed())
    return Step(stack_outputs(outputs), _by_name(gradients), _by_name(state), changed, modes)


def _step_at_once(stack: Any, inputs: Sequence[Tensor], draws: bool) -> Step:
    copied, mode = _Copy(stack.net, stack.net), MemberDraws(range(len(stack)))
    values = {key: _copied(tensor) for key, _, _, tensor in stack.stacked_tensors()}
    for part in copied.module.modules():
        if isinstance(part, StackedLayer):
            vars(part)["forward"] = part.run_each
    output, gradients = _pass(copied, mode if draws else nullcontext(), values, inputs, stack.split_rows)
    return Step(output, _whole(stack, gradients), _whole(stack, values.values()), [copied.changed()], [mode])


def _pass(
    copied: _Copy,
    mode: AbstractContextManager[Any],
    tensors: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    by_member: Callable[[Any], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs (n, B, ...), and the gradients of all tensors for weights that are the same in each pass."""
    torch.default_generator.manual_seed(0)
    rows = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    place_tensors(copied.module, tensors)
    with mode:  # in the backward pass as well, where checkpointed parts draw again
        outputs = by_member(copied.module(*rows))
        gradients = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        if outputs.requires_grad and trained:
            found = torch.autograd.grad(outputs, [*trained.values()], _weights_like(outputs), allow_unused=True)
            gradients.update((name, own) for name, own in zip(trained, found, strict=True) if own is not None)
    return outputs.detach(), list(gradients.values())


def place_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a module compute with tensors, of any kind, in the place of its parameters and buffers of these names."""
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        part = module.get_submodule(path)
        tensors_of_part: dict[str, Any] = part._parameters if own in part._parameters else part._buffers
        tensors_of_part[own] = tensor


def _weights_like(outputs: Tensor) -> Tensor:
    """Return substitutes for the gradients of the outputs (n, B, ...): waves, of the size that a mean would give."""
    size = outputs[0].numel()
    waves = (
        torch.arange(size, device=outputs.device, dtype=torch.float32).mul_(1.7).cos_().div_(math.sqrt(max(size, 1)))
    )
    return waves.view(outputs.shape[1:]).to(outputs.dtype).expand_as(outputs)


class _Copy:
    """A copy of a module, without hooks, that belongs to no Trainer and logs nothing."""

    def __init__(self, module: nn.Module, net: nn.Module) -> None:
        trainer = getattr(net, "_trainer", None)
        copier = ModelCopier(lambda value: value if isinstance(value, nn.Parameter) else value.detach().clone())
        for known in (trainer, vars(module).get("log") if hasattr(module, "log_dict") else None):
            if known is not None:
                copier.substitute(known, known)
        self.original, self.module = module, copier.copy_module(module)
        for part in self.module.modules():
            for name, value in vars(part).items():
                if name.endswith("_hooks"):
                    value.clear()
            if hasattr(part, "log_dict"):
                stub_trainer(part, trainer, {})
        self._before = self._different().keys()  # attributes that cannot be compared, or that a Trainer has set

    def changed(self) -> dict[str, Any]:
        """Return the attributes that a call has changed, by their qualified names."""
        return {name: value for name, value in self._different().items() if name not in self._before}

    def _different(self) -> dict[str, Any]:
        originals, parts = dict(self.original.named_modules()), dict(self.module.named_modules())
        pairs = {(id(originals[path]), id(part)) for path, part in parts.items()}
        return {
            f"{path}.{name}".lstrip("."): vars(part).get(name)
            for path, part in parts.items()
            if not isinstance(part, StackedLayer)
            for name in different_attributes(originals[path], part, pairs)
        }


def _describe_difference(at_once: Step, alone: Step, n: int, drawn_elsewhere: bool) -> str:
    shapes, given, expected = at_once.modes[0].shapes, at_once.outputs, alone.outputs
    if drawn_elsewhere or any([(n * rows, *rest) for rows, *rest in own.shapes] != shapes for own in alone.modes):
        return "the model draws random numbers once for all members"
    if given.shape != expected.shape:
        return f"outputs of shape {tuple(given.shape)} instead of {tuple(expected.shape)}"
    half = given.dtype.itemsize < 4 or torch.is_autocast_enabled(given.device.type)
    tolerance = _HALF if half else _EXACT
    for kind, ours, theirs in (
        ("outputs", [given], [expected]),
        ("gradients", at_once.gradients, alone.gradients),
        ("buffers", at_once.state, alone.state),
    ):
        off = relative_difference(ours, theirs, floor=1e-6)
        if off > tolerance:
            return f"the model mixes rows of a batch outside its layers ({kind} differ by {off:.2g} of the largest)"
    for name in dict.fromkeys(name for changed in (*at_once.changed, *alone.changed) for name in changed):
        values = [changed.get(name) for changed in alone.changed]
        if not same_or_rows_of(at_once.changed[0].get(name), values, tolerance):
            return f"the model keeps {name}, which all members would share"
    return ""


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(torch.is_grad_enabled() and tensor.requires_grad)


def _whole(stack: Any, values: Iterable[Tensor]) -> list[Tensor]:
    """Return stacked tensors as those of all members, (n, ...)."""
    layers = ((layer, name) for _, layer, name, _ in stack.stacked_tensors())
    return [layer.to_stored(name, value).detach() for (layer, name), value in zip(layers, values, strict=True)]


def _changed_parameter(stack: Any, alone: Step) -> str:
    if not torch.is_grad_enabled():
        return ""
    tensors = {key: tensor for key, _, _, tensor in stack.stacked_tensors()}
    pairs = zip(tensors, _whole(stack, tensors.values()), alone.state, strict=True)
    return next((name for name, a, b in pairs if tensors[name].requires_grad and not a.equal(b)), "")


def _by_name(members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(tensors) for tensors in zip(*members, strict=True)]


def _are_same(inputs: Sequence[Tensor], n: int) -> bool:
    return all(torch.equal(part, parts[0]) for parts in (value.chunk(n) for value in inputs) for part in parts[1:])


def _varied(rows: Tensor, n: int) -> Tensor:
    """Return rows in another order for each member and, unless they are whole numbers, smaller for each."""
    parts = [part.roll(index, 0) for index, part in enumerate(rows.chunk(n))]
    if rows.is_floating_point():
        parts = [part * (1 - index / (2 * n)) for index, part in enumerate(parts)]
    return torch.cat(parts)


def _numpy_state() -> Any:
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in np.random.get_state()]


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep copies of weights out of the cache that autocast has for the whole step."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class MemberDraws(TorchDispatchMode):
    """Seed each random operation by torch's generator and by the member that it is for, and cut one of several members.

    The global generators must be isolated around it. Dropout inside fused attention is left out, as its random numbers
    are drawn by no operation of their own.

    Args:
        members: The numbers of the members whose rows a batch holds, one member after another.

    Attributes:
        shapes: Shapes of the results of all random operations so far.
        has_drawn: Whether there was any, one that was left out as well.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.members = members
        self.shapes: list[tuple[int, ...]] = []
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; a random one for each member by itself."""
        names, kwargs = argument_names(func), dict(kwargs or {})
        self.has_drawn |= "dropout_p" in names or torch.Tag.nondeterministic_seeded in func.tags
        if "dropout_p" in names[: len(args)]:
            where = names.index("dropout_p")
            args = (*args[:where], 0.0, *args[where + 1 :])
        if torch.Tag.nondeterministic_seeded not in func.tags or "dropout_p" in names:
            return func(*args, **kwargs)
        kwargs.update({"generator": None} if "generator" in kwargs else {})  # a state of its own would be changed
        rows, n = _rows(names, args), len(self.members)
        count = n if rows and rows % n == 0 else 1
        in_place = func.__name__.partition(".")[0].endswith("_")
        parts = []
        # drawn, so that a checkpointed part gets it again
        seed = int(torch.randint(2**40, (), device="cpu"))
        state = torch.get_rng_state()
        for index in range(count):
            _seed(seed + self.members[index])
            own = [_cut(name, value, rows, index, count) for name, value in zip(names, args, strict=False)]
            if in_place:
                own[0] = own[0].clone(memory_format=torch.contiguous_format)
            parts.append(func(*own, **kwargs))
        torch.set_rng_state(state)
        if isinstance(parts[0], Tensor):
            result = parts[0] if count == 1 else torch.cat(parts)
            self.shapes.append(tuple(result.shape) or (1,))
            return args[0].copy_(result) if in_place else result
        results = tuple(map(torch.cat, zip(*parts, strict=True)))
        self.shapes.append(tuple(results[0].shape))
        return results


def _rows(names: Sequence[str], args: Sequence[Any]) -> int:
    """Return the length of the result; 0 for results without rows, such as permutations."""
    for name, value in zip(names, args, strict=False):
        if name == "size":
            return int(value[0]) if value else 0
        if isinstance(value, Tensor):
            return len(value) if value.ndim else 0
    return 0


def _cut(name: str, value: Any, rows: int, index: int, count: int) -> Any:
    """Return a member's part of an argument."""
    if name == "size" and count > 1:
        return [rows // count, *value[1:]]
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor) and value.ndim and len(value) == rows:
        return value.narrow(0, index * (rows // count), rows // count)
    return value


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
