"""Guards for private symbols of other libraries: a missing one raises an error that names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from traceback import walk_tb
from typing import Any, ParamSpec, TypeVar

LIGHTNING_PACKAGES = {"lightning", "lightning_fabric", "pytorch_lightning"}
_TRUSTED_PACKAGES = {"contextlib", "importlib", *LIGHTNING_PACKAGES, "lightning_tricks", "torch"}


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class PrivateSymbolGuard:
    """Turn the error of a missing private symbol into one that names the trick; a context manager and a decorator.

    Args:
        trick: What does not work without the symbol.
        also: More exception types that a changed library may cause, beside AttributeError and ImportError.

    Raises:
        RuntimeError: If the symbol is missing; the message names the trick, the version and the remedy.

    Attributes:
        library: The name of the library.
        supported: Its supported versions, as "2.5 to 2.6".
    """

    library: str
    supported: str

    def __init__(self, trick: str, *also: type[Exception]) -> None:
        self._trick = trick
        self._types: tuple[type[Exception], ...] = (AttributeError, ImportError, *also)

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, self._types) and not _passed_through_other_code(error):
            version = import_module(self.library).__version__
            raise RuntimeError(
                f"{self._trick} does not work with {self.library} {version} ({error}): install a version from "
                f"{self.supported}."
            ) from error

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        """Guard a function; at a step it costs a call, where a context for each call would cost four."""

        @wraps(function)
        def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except self._types as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise

        return guarded


def _passed_through_other_code(error: BaseException) -> bool:
    """Whether user code was running (a hook, a dataset), whose errors say nothing about the library."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__", "").partition(".")[0] not in _TRUSTED_PACKAGES for frame in frames)


def set_private(owner: Any, **values: Any) -> None:
    """Set attributes that an object already has; no attribute is added.

    Raises:
        AttributeError: If the object lacks one of the attributes; none of them is set then.
    """
    for name in values:
        getattr(owner, name)
    for name, value in values.items():
        setattr(owner, name, value)


@contextmanager
def overriding(owner: Any, **methods: Any) -> Iterator[None]:
    """Override methods of one object, and remove the overrides on leaving.

    Raises:
        AttributeError: If the object lacks one of the methods; none of them is overridden then.
    """
    set_private(owner, **methods)
    try:
        yield
    finally:
        for name in methods:
            vars(owner).pop(name, None)
