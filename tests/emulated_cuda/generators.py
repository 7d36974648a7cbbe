"""`torch.Generator` for a device that is emulated: the CPU's generator, which says that it is the device's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class _KnowsAll(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_KnowsAll):
    """Stands for `torch.Generator` while devices are emulated."""

    _emulated: ClassVar[dict[int, Generator]] = {}  # by the object in C++, which operators see in another wrapper

    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls, device="cpu")
        made.emulated = torch.device(device)
        if made.emulated.type == "cuda":
            cls._emulated[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.emulated.index or 0) if self.emulated.type == "cuda" else self.emulated

    @classmethod
    def is_emulated(cls, generator: torch.Generator) -> bool:
        return generator._cdata in cls._emulated
