"""Random numbers of members that are the same whether the members run at once or one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._torch_compat.operators import TorchDispatchMode, argument_names


class MemberDraws(TorchDispatchMode):
    """Seed each random operation by torch's generator and by the member that it is for, and cut one of several members.

    The global generators must be isolated around it. Dropout inside fused attention is left out, as its random numbers
    are drawn by no operation of their own.

    Args:
        members: The numbers of the members whose rows a batch holds, one member after another.

    Attributes:
        shapes: Shapes of the results of all random operations so far.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.members = members
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; a random one for each member by itself."""
        names, kwargs = argument_names(func), dict(kwargs or {})
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
        # drawn, so that what is checkpointed gets it again
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
    """Return the length of what is drawn; 0 where it has none, as a permutation."""
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
