"""Lazy public names (PEP 562): importing a package costs nothing until one of its names is used."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # what annotations need would take longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def public_packages() -> list[str]:
    """Return the names of the packages with public names of their own, such as `lightning_tricks.ensembles`."""
    from pkgutil import iter_modules

    found = iter_modules(sys.modules["lightning_tricks"].__path__, "lightning_tricks.")
    return [module.name for module in found if module.ispkg and "._" not in module.name]


def packages_with(name: str) -> list[str]:
    """Return those of `public_packages()` that have a public name."""
    return [package for package in public_packages() if name in import_module(package).__all__]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of the package that calls.

    Its public names are those that it imports under `if TYPE_CHECKING:`. These imports never run, but Python compiles
    them: the names in the package's code are, in this order, that of each module and those that are imported from it.
    So no source is read, which a frozen program does not have.

    Args:
        package: The package's `__name__`. Its imports from a module follow one another, as ruff sorts them.

    Returns:
        What to bind to `__getattr__`, `__dir__` and `__all__` in the package's namespace.
    """
    home: dict[str, str] = {}
    module = ""
    for name in sys._getframe(1).f_code.co_names:
        if name == __name__:  # the import of this function, after the others
            break
        if name.startswith("lightning_tricks."):
            module = name
        elif module:
            home[name] = module
    public = sorted(name for name in home if not name.startswith("_"))

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in home:
            return getattr(import_module(home[name]), name)
        elsewhere = [] if name.startswith("_") or "." in package else packages_with(name)
        remedy = f"write `from {elsewhere[0]} import {name}`" if elsewhere else f"it has {', '.join(public)}"
        # `from package import name` asks here first, and would replace an AttributeError by a message of its own
        kind = ImportError if sys._getframe(1).f_code.co_name == "_handle_fromlist" and elsewhere else AttributeError
        raise kind(f"module {package!r} has no attribute {name!r}; {remedy}")

    return __getattr__, lambda: public, public
