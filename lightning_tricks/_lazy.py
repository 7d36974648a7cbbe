"""Lazy public names (PEP 562): importing a package costs nothing until one of its names is used."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # what annotations need would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy_names(
    package: str, table: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package's `__getattr__`, `__dir__` and `__all__` from a table of names.

    Args:
        package: The package's `__name__`.
        table: Submodule of `package` -> the public names that it holds; with a dot in front, of the package above it.

    Returns:
        What to bind to `__getattr__`, `__dir__` and `__all__` in the package's namespace.
    """
    home = {name: submodule for submodule, names in table.items() for name in names}
    public = sorted(name for name in home if not name.startswith("_"))

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(public)}")
        return getattr(import_module(f".{home[name]}", package), name)

    return __getattr__, lambda: public, public
