"""Digests of values at a bounded cost: to see what changed, and to compare two processes."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import types
import weakref
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_tricks.auto_resume.core.attributes.plain_values import (
    DEEPEST,
    SCALARS,
    Room,
    container_base,
    encode,
    entries,
    generator_state,
    is_a,
    label,
    name_of,
)

MOST_ENTRIES = 10_000  # of a container; of a larger one, some are looked at
_SAMPLED_ENTRIES = 1_000
_MOST_PARTS = 200_000  # of a value, with all that lies in it
_SAMPLED_BYTES = 2**18
_WHOLE_TENSOR, _WHOLE_ARRAY, _WHOLE_ANYWHERE = 2**18, 2**24, 2**20
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
# which the fresh process has anyway, or that say nothing about a run
IGNORED = (types.ModuleType, weakref.ref, logging.Logger, type(threading.Lock()), type(threading.RLock()))


class Digest:
    """Digests one value with all that lies in it.

    Args:
        registered: Ids of parameters and buffers, which count by their type.
        here: Whether the digest is compared in this process alone: then identities of what is opaque or too large to
            be read, and states of generators, count too.
        is_entered: Tells objects whose attributes are looked at on their own; they count by their type.

    Attributes:
        whole: Whether everything was read.
        holes: Place of each value that is no data, with the name of its type.
    """

    def __init__(self, registered: Any = (), here: bool = True, is_entered: Any = lambda value: False) -> None:
        self._registered, self._here, self._is_entered = registered, here, is_entered
        self._hash = blake2b(digest_size=8)
        self._parts, self._inside = 0, set[int]()
        self.whole = True
        self.holes: set[tuple[tuple[str, ...], str]] = set()

    def __int__(self) -> int:
        return int.from_bytes(self._hash.digest(), "big")

    def feed(self, value: Any, place: tuple[str, ...] = ()) -> None:
        """Take a value in."""
        kind = type(value)
        self._parts += 1
        if kind in SCALARS:
            self._feed_scalar(kind, value)
            return
        base = container_base(kind)
        if base is not None and len(place) < DEEPEST and id(value) not in self._inside:
            self._inside.add(id(value))
            self._feed_container(value, base, place)
            self._inside.discard(id(value))
            return
        try:
            known = id(value) not in self._registered and self._feed_leaf(value, kind, bool(place))
        except Exception:  # whatever a strange object raises
            known = False
        if not known:
            self._feed_opaque(value, kind, place)

    def _say(self, text: str, data: Any = b"") -> None:
        self._hash.update(f"{text};".encode("utf-8", "surrogatepass"))
        self._hash.update(data)

    def _feed_scalar(self, kind: type, value: Any) -> None:
        if kind is str and len(value) > _SAMPLED_BYTES:
            self._partly(value, len(value))
            value = value[:: len(value) // _SAMPLED_BYTES]
        self._say(f"{kind.__name__} {value if kind is not int else hex(value)!r}")

    def _partly(self, value: Any, size: int) -> None:
        self.whole = False
        self._say(f"{size} {id(value) if self._here else ''}")

    def _feed_container(self, value: Any, base: type, place: tuple[str, ...]) -> None:
        size = base.__len__(value)  # type: ignore[attr-defined]
        self._say(f"{name_of(type(value))} {size} {getattr(value, 'maxlen', '') if base.__name__ == 'deque' else ''}")
        step = 1
        if size > MOST_ENTRIES or self._parts + size > _MOST_PARTS:
            self._partly(value, size)
            if self._parts > 2 * _MOST_PARTS:
                return
            step = max(1, size // _SAMPLED_ENTRIES)
        if is_a(base, set, frozenset):
            self._feed_set(value, base, step, place)
            return
        with_keys = is_a(base, dict)
        for key, part in itertools.islice(entries(value, base), 0, None, step):
            inner = (*place, label(key))
            if with_keys:
                self.feed(key, inner)
            self.feed(part, inner)

    def _feed_set(self, value: Any, base: type, step: int, place: tuple[str, ...]) -> None:
        numbers = []
        chosen = entries(value, base) if step == 1 else ()  # which entries come first differs between processes
        for _, part in chosen:
            digest = Digest(self._registered, self._here, self._is_entered)
            digest.feed(part, (*place, label(part)))
            self.holes |= digest.holes
            numbers.append(int(digest))
        self._parts += len(numbers)
        self._say(repr(sorted(numbers)))

    def _feed_leaf(self, value: Any, kind: type, is_entry: bool) -> bool:
        if is_a(kind, Tensor):
            return self._feed_tensor(value, is_entry)
        if kind is np.ndarray or is_a(kind, np.generic):
            return self._feed_array(np.asarray(value), value)
        if kind in (bytes, bytearray):
            step = max(1, len(value) // _WHOLE_ARRAY)
            if step > 1:
                self._partly(value, len(value))
            self._say(f"{kind.__name__} {len(value)}", bytes(value[::step]))
            return True
        if is_a(kind, *_FUNCTIONS):
            self._say(f"function {getattr(value, '__module__', '')} {value.__qualname__}")
            return False
        if generator_state(value) is not None:
            name, state = generator_state(value) or ("", None)
            self._say(f"generator {name.partition(' ')[0]}")
            if self._here:
                self.feed(state)
            return True
        room = Room(left=4096)
        encoded = encode(value, room)
        if room.holes:
            return False
        self._say(f"{kind.__name__} {encoded!r}")
        return True

    def _feed_tensor(self, value: Tensor, is_entry: bool) -> bool:
        plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
        if not plain or value.device.type == "meta":
            return False
        size = value.numel() * value.element_size()
        self._say(f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad and value.is_leaf}")
        if self._here and value.device.type != "cpu" and not (is_entry or value.is_inference()):
            self._partly(value, size)  # without waiting for the device
            self._say(f"{value._version}")
            return True
        data = value.detach().resolve_conj().resolve_neg()
        if size > (_WHOLE_TENSOR if self._here else _WHOLE_ANYWHERE):
            self._partly(value, size)
            if self._here and not value.is_inference():
                self._say(f"{value._version}")
            data = _sample(data, value.numel() * value.element_size() // _SAMPLED_BYTES)
        self._hash.update(data.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        return True

    def _feed_array(self, array: Any, value: Any) -> bool:
        if array.dtype.kind not in "biufcUSmM":
            return False
        self._say(f"{type(value).__name__} {array.dtype.str} {array.shape}")
        if array.nbytes > (_WHOLE_ARRAY if self._here else _WHOLE_ANYWHERE):
            self._partly(value, array.nbytes)
            array = (
                array.reshape(-1)[:: max(1, array.nbytes // _SAMPLED_BYTES)] if array.flags.contiguous else array[:1]
            )
        self._hash.update(array.tobytes())
        return True

    def _feed_opaque(self, value: Any, kind: type, place: tuple[str, ...]) -> None:
        self._say(f"object {name_of(kind)}")
        self.holes.add((place, name_of(kind)))
        if is_a(kind, *IGNORED) or not self._here or id(value) in self._registered or self._is_entered(value):
            return
        if not is_a(kind, *_FUNCTIONS):
            self._say(str(id(value)))
            self._say(_position(value, kind))


def _sample(data: Tensor, step: int) -> Tensor:
    """Return entries that lie over a whole tensor."""
    if data.is_contiguous():
        return data.reshape(-1)[:: max(1, step)]
    while data.dim() and data.numel() > _SAMPLED_BYTES:
        sizes = data.shape
        axis = max(range(data.dim()), key=sizes.__getitem__)
        data = data.narrow(axis, 0, 1) if sizes[axis] < 4 else data[(slice(None),) * axis + (slice(None, None, 2),)]
    return data


def _position(value: Any, kind: type) -> str:
    """Return how far an iterator is, as far as it tells."""
    if is_a(kind, _BaseDataLoaderIter):
        return str(value._num_yielded)
    if kind.__module__ == "multiprocessing.sharedctypes":
        return repr(value.get_obj().value)
    if is_a(kind, itertools.count):
        return repr(value)
    if is_a(kind, types.GeneratorType):
        return str(value.gi_frame is None or value.gi_frame.f_lasti)
    if kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):
        return str(operator.length_hint(value, -1))
    return ""
