"""Values from plain data, without running code of the file that held them."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tricks.auto_resume.core.attributes.attribute_access import attributes, has_attributes, set_attribute
from lightning_tricks.auto_resume.core.attributes.encoding import FACTORIES
from lightning_tricks.auto_resume.core.attributes.generators import new_generator
from lightning_tricks.auto_resume.core.attributes.in_place import fill_container
from lightning_tricks.auto_resume.core.attributes.scalar_encoding import read_scalar
from lightning_tricks.auto_resume.core.attributes.value_parts import PART_KINDS, is_mutable
from lightning_tricks.auto_resume.core.attributes.value_types import (
    BASES,
    MISSING,
    CannotRestoreError,
    container_items,
    find_class,
    function_name,
    is_subclass,
    key_label,
    type_name,
)


class ObjectResolver:
    """Finds what an encoded value refers to in this process; this base class finds nothing but what was decoded.

    Attributes:
        made: Path -> entry of a container that was decoded.
    """

    def __init__(self, made: dict[str, Any] | None = None) -> None:
        self.made: dict[str, Any] = {} if made is None else made

    def known(self, path: str) -> Any:
        """Return the value at a path.

        Raises:
            CannotRestoreError: If there is no such path.
        """
        if path in self.made:
            return self.made[path]
        raise CannotRestoreError(f"it refers to {path}, which does not exist")

    def rebuild(self, name: str) -> Any:
        """Return a new object of a class, without attributes and without calling `__init__`.

        Raises:
            CannotRestoreError: If that is not possible without running code of the class.
        """
        raise CannotRestoreError(f"it holds a {name}, which is not plain data")

    def note_made(self) -> None:
        """Note that there is a new container that has attributes."""


def decode(encoded: Any, present: Any = MISSING, resolver: ObjectResolver | None = None, path: str = "") -> Any:
    """Return the value that was encoded.

    Args:
        encoded: What `encode` returned, possibly saved to a file and loaded.
        present: The value in the same location of this process; it fills holes, and tells classes and devices.
        resolver: Finds what neither of them holds.
        path: Path of the value, for others that refer to its entries; empty if none does.

    Raises:
        CannotRestoreError: If the value needs something that this process lacks.
    """
    resolver = resolver or ObjectResolver()
    if type(encoded) is list:
        return _decode_container({"kind": "list", "items": encoded}, present, resolver, path)
    if type(encoded) is not dict:
        return encoded
    kind = encoded["kind"]
    if kind == "hole":
        fits = present is not MISSING and encoded["type"] in (type_name(type(present)), function_name(present))
        return present if fits else resolver.rebuild(encoded["type"])
    if kind == "clock":
        return present if type(present) is float else encoded["value"]
    if kind == "same":
        return resolver.known(encoded["path"])
    if "items" in encoded:
        return _decode_container(encoded, present, resolver, path)
    if kind in ("tensor", "parameter"):
        return _decode_tensor(encoded, present)
    if kind in ("array", "scalar"):
        dtype: Any = np.lib.format.descr_to_dtype(decode(encoded["dtype"]))
        data = np.frombuffer(encoded["data"].numpy().tobytes(), dtype=dtype)
        array = data.reshape(encoded["shape"]).copy()
        return array if kind == "array" else array[()]
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(encoded["data"].numpy().tobytes())
    if kind == "enum":
        members = find_class(encoded["class"], enum.Enum, present)._member_map_  # type: ignore[attr-defined]
        if encoded["name"] not in members:
            raise CannotRestoreError(f"{encoded['class']} has no {encoded['name']}")
        return members[encoded["name"]]
    if kind == "parts":
        return PART_KINDS[encoded["type"]].make(decode(encoded["parts"], resolver=resolver))
    if kind == "generator":
        return new_generator(encoded["type"], decode(encoded["state"]))
    return read_scalar(encoded)


def _decode_container(encoded: dict[str, Any], present: Any, resolver: ObjectResolver, path: str) -> Any:
    base: Any = next(base for base in BASES if base.__name__ == encoded["kind"])
    kind = find_class(encoded["class"], base, present) if "class" in encoded else base
    ordered = present is not MISSING and is_subclass(type(present), base) and not is_subclass(base, set, frozenset)
    here = dict(container_items(present, base)) if ordered else {}
    if is_subclass(base, dict):
        keys = [decode(key, resolver=resolver) for key, _ in encoded["items"]]
        pairs = [
            (key, _decode_entry(part, here.get(key, MISSING), resolver, path, key))
            for key, (_, part) in zip(keys, encoded["items"], strict=True)
        ]
        value = _new_dict(kind, base, pairs, encoded, present)
    else:
        parts = [
            _decode_entry(part, here.get(number, MISSING), resolver, path, number)
            for number, part in enumerate(encoded["items"])
        ]
        value = base.__new__(kind, parts) if base in (tuple, frozenset) else base.__new__(kind)
        if base not in (tuple, frozenset):
            base.__init__(value, parts, *([encoded["maxlen"]] if base is deque else []))
    if kind is not base and has_attributes(kind):  # they are restored afterwards, where they changed
        for name, part in attributes(present) if type(present) is kind else ():
            set_attribute(value, name, part)
        resolver.note_made()
    return value


def _decode_entry(encoded: Any, present: Any, resolver: ObjectResolver, path: str, key: Any) -> Any:
    inner = f"{path}.{key_label(key)}" if path else ""
    value = decode(encoded, present, resolver, inner)
    kind = encoded["kind"] if type(encoded) is dict else ""
    if inner and kind != "same" and (kind == "hole" or is_mutable(type(value))):
        resolver.made.setdefault(inner, value)
    return value


def _new_dict(kind: type, base: Any, pairs: list[tuple[Any, Any]], encoded: dict[str, Any], present: Any) -> Any:
    value = base.__new__(kind)
    if base is defaultdict:
        factory = FACTORIES.get(encoded.get("factory", ""))
        if factory is None and is_subclass(type(present), defaultdict):
            factory = present.default_factory
        if factory is None:
            raise CannotRestoreError("it holds a defaultdict whose factory is unknown")
        defaultdict.__init__(value, factory)
    fill_container(value, pairs, base)
    return value


def _decode_tensor(encoded: dict[str, Any], present: Any) -> Tensor:
    device = torch.device(encoded["device"])
    if is_subclass(type(present), Tensor) and present.device.type == device.type:
        device = present.device
    elif device.type != "cpu" and not torch.get_device_module(device).is_available():
        device = torch.device("cpu")
    data = encoded["data"].to(device, copy=True)
    if encoded["kind"] == "parameter":
        return nn.Parameter(data, requires_grad=bool(encoded["requires_grad"]))
    return data.requires_grad_() if encoded["requires_grad"] else data  # type: ignore[no-any-return]
