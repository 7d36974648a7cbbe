"""The version of the installed package, which `pyproject.toml` states."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lightning-tricks")
except PackageNotFoundError:  # its source on the path alone
    __version__ = "0+unknown"
