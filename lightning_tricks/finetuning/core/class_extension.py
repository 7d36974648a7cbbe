"""Change the behaviour of a single module by a subclass of its class, which pickles and can be taken away again."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import nn

_RECIPE = "_extension_recipe"  # of an extended class: the class below, the mixin, and its weights


def extend(module: nn.Module, mixin: type, weights: tuple[str, ...] = ()) -> None:
    """Put a mixin in front of a module's class, and properties in the place of some of its weights.

    Names, parameters, hooks and the identity of the module stay; `isinstance` holds for its former class.

    Args:
        module: The module; only its class changes.
        mixin: A class whose methods come before those of the module's class. If weights are given, it has a method
            `compute_weight(name)`.
        weights: The names of tensors of the module that are computed whenever they are read.
    """
    below: Any = type(module)
    module.__class__ = _extended_class(below, mixin, weights)


class _Nothing:
    """A mixin that changes nothing."""


def is_extensible(module: nn.Module) -> bool:
    """Whether Python lets a module take on a subclass of its class, which depends on the bases: not under `abc.ABC`."""
    below: Any = type(module)
    try:
        object.__setattr__(object.__new__(below), "__class__", type(below)(below.__name__, (_Nothing, below), {}))
    except TypeError:
        return False
    return True


def restore(module: nn.Module, mixin: type) -> None:
    """Take away the mixin of a type that `extend` put in front of a module's class; others stay.

    Raises:
        ValueError: As `check_restorable`.
    """
    check_restorable(module, mixin)
    module.__class__ = _without(type(module), mixin)


def check_restorable(module: nn.Module, mixin: type) -> None:
    """Raise a ValueError if a module's class was changed, by FSDP or another library, after it was extended."""
    cls: Any = type(module)
    while _RECIPE in vars(cls):
        cls, own, _ = vars(cls)[_RECIPE]
        if issubclass(own, mixin):
            return
    raise ValueError(
        f"a module became a {type(module).__name__} after it was changed: undo that first, or load a checkpoint "
        "into a newly built model."
    )


def class_below(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without all extensions."""
    cls: Any = type(module)
    while _RECIPE in vars(cls):
        cls = vars(cls)[_RECIPE][0]
    return cast(type[nn.Module], cls)


def _without(cls: Any, mixin: type) -> Any:
    below, own, weights = vars(cls)[_RECIPE]
    return below if issubclass(own, mixin) else _extended_class(_without(below, mixin), own, weights)


@cache
def _extended_class(below: type, mixin: type, weights: tuple[str, ...]) -> type:
    members = {name: _computed(name) for name in weights}
    return type(
        f"{mixin.__name__.removeprefix('_')}{below.__name__}",
        (mixin, below),
        {**members, _RECIPE: (below, mixin, weights), "__reduce_ex__": _reduce, "__module__": below.__module__},
    )


def _computed(name: str) -> property:
    def read(self: Any) -> Any:
        return self.compute_weight(name)

    def write(self: Any, value: Any) -> None:
        vars(self)[name] = value  # what a hook sets before each forward pass, such as that of spectral_norm

    def delete(self: Any) -> None:
        del vars(self)[name]  # as `remove_weight_norm` does before it registers a parameter

    return property(read, write, delete)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Name the class by its recipe, because classes that are made at run time cannot be found by their names."""
    made = object.__reduce_ex__(self, max(2, int(protocol)))
    return (_new, (_recipe(type(self)),), *cast(tuple[Any, ...], made)[2:])


def _recipe(cls: type) -> Any:
    if _RECIPE not in vars(cls):
        return cls
    below, mixin, weights = vars(cls)[_RECIPE]
    return _recipe(below), mixin, weights


def _new(recipe: Any) -> Any:
    cls: Any = _class_of(recipe)
    return cls.__new__(cls)


def _class_of(recipe: Any) -> type:
    if isinstance(recipe, type):
        return recipe
    below, mixin, weights = recipe
    return _extended_class(_class_of(below), mixin, weights)
