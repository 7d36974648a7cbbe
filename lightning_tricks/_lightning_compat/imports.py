"""The two packages that hold Lightning: the classes of one are not those of the other."""

from __future__ import annotations


def other_import_style(kind: type) -> str:
    """Return what to change where a class comes from `pytorch_lightning`; nothing where it does not."""
    if not any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in kind.__mro__):
        return ""
    return (
        f"{kind.__name__} comes from `pytorch_lightning`, whose classes lightning_tricks does not work with: write "
        "`import lightning.pytorch as pl` instead of `import pytorch_lightning as pl` wherever the program does."
    )
