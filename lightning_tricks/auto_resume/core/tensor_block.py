"""Small tensors in few blocks, and plain values in one text: `torch.save` is slow for each storage and each object."""

from __future__ import annotations

import json
import math
import operator
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MAX_BYTES = 1 << 14  # of a tensor in a block
_NAMES = "float64 int64 float32 int32 float16 bfloat16 int16 int8 uint8 bool"  # each begins at a multiple of its size
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_TRAITS = operator.attrgetter("is_cpu", "requires_grad", "is_quantized", "dtype", "shape")
Block = tuple[list[int], Tensor]
_OF_JSON = frozenset({str, float, bool, type(None)})
_NUMBERS = frozenset({int, float, bool, type(None)})
_LARGEST = 1 << 4096  # of the numbers in a text, as Python reads at most 4,300 digits
_NAMED = ("tuple", "dict", "int")  # what follows the mark of what JSON would change


def pack(value: Any) -> dict[str, Any]:
    """Return plain values, lists, tuples and dicts as one text in JSON, and all small tensors in one tensor.

    `torch.save` and what reads plain data call functions in Python for each object, so each sees a handful of these.
    Tensors are packed that are plain and contiguous, on the CPU, without gradients, and of 16 KiB at most. Others stay,
    and so does what JSON does not have.
    """
    packer = _Packer()
    text = json.dumps(packer.encode(value), check_circular=False)
    kinds, blocks = [], [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for name, dtype in _DTYPES.items():
        for (of_kind, shape), (mark, tensors) in packer.alike.items():
            if of_kind is dtype and tensors:
                kinds.append([mark, name, list(shape), len(tensors)])
                blocks.append(torch.stack(tensors).view(-1).view(torch.uint8))
    return {"text": text, "mark": packer.mark, "others": packer.others, "kinds": kinds, "block": torch.cat(blocks)}


class _Packer:
    """Encodes values for JSON, and takes out what it does not have.

    Attributes:
        mark: What begins each mark; the whole mark stands for the next value of its kind.
        alike: Dtype and shape of small tensors -> their mark, which is empty if they stay, and the tensors.
        others: What stays.
    """

    def __init__(self) -> None:
        self.mark, self.others = secrets.token_hex(8), list[Any]()
        self.alike: dict[tuple[torch.dtype, torch.Size], tuple[str, list[Tensor]]] = {}
        self._tuple, self._dict, self._int = (self.mark + name for name in _NAMED)

    def encode(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        kind = type(value)
        if kind in _OF_JSON:
            return value
        if kind is int:
            return value if -_LARGEST < value < _LARGEST else {self._int: hex(value)}
        if kind is list or kind is tuple:
            kinds = {*map(type, value)}  # such as that of the 625 numbers of a random state
            is_flat = kinds <= _OF_JSON or (kinds == {int} and min(value) > -_LARGEST and max(value) < _LARGEST)
            parts = value if is_flat else [*map(self.encode, value)]
            return parts if kind is list else {self._tuple: parts}
        if kind is dict:
            if set(map(type, value)) <= {str}:
                return {key: self.encode(part) for key, part in value.items()}
            return {self._dict: [[self.encode(key), self.encode(part)] for key, part in value.items()]}
        is_plain = kind is Tensor and not value.requires_grad and value.layout is torch.strided
        if is_plain and value.is_cpu and value.is_contiguous():
            like = value.dtype, value.shape
            if like not in self.alike:
                is_packed = value.dtype in _DTYPES.values() and 0 < value.nbytes <= _MAX_BYTES
                self.alike[like] = f"{self.mark}{len(self.alike)}" if is_packed else "", []
            mark, tensors = self.alike[like]
            if mark:
                tensors.append(value)
                return mark
        self.others.append(value)
        return self.mark


def unpack(packed: Mapping[str, Any]) -> Any:
    """Return the containers that `pack` was given, with small tensors that have memory of their own.

    Raises:
        ValueError: If the text is none, or the description is not that of the block.
    """
    block, start, marked = packed["block"], 0, dict[str, Iterator[Any]]()
    unbind_copy: Any = torch.unbind_copy  # which torch declares to return nothing
    for mark, name, shape, count in packed["kinds"]:
        is_known = name in _DTYPES and all(type(number) is int and number > 0 for number in (count, *shape))
        end = start + count * math.prod(shape) * _DTYPES[name].itemsize if is_known else 0
        if not start < end <= block.numel():
            raise ValueError("the small tensors of the checkpoint do not match their index")
        of_kind = block[start:end].view(_DTYPES[name]).view(count, *shape)
        start, marked[mark] = end, iter(unbind_copy(of_kind))
    is_of_format_3 = "text" not in packed  # with the containers themselves
    prefix = secrets.token_hex(8) if is_of_format_3 else packed["mark"]
    of_tuple, of_dict, of_int = (prefix + name for name in _NAMED)
    marked[prefix] = iter(packed.get("others", ()))

    def decode(value: Any) -> Any:
        kind = type(value)
        if kind is str and value in marked:
            if (found := next(marked[value], None)) is None:
                raise ValueError("the checkpoint has fewer small tensors than it refers to")
            return found
        if kind is dict:
            if len(value) == 1:
                if of_tuple in value:
                    return tuple(map(decode, value[of_tuple]))
                if of_dict in value:
                    return {decode(key): decode(part) for key, part in value[of_dict]}
                if of_int in value:
                    return int(value[of_int], 16)
            return {key: decode(part) for key, part in value.items()}
        if kind is list or kind is tuple:
            return value if _NUMBERS.issuperset(map(type, value)) else kind(map(decode, value))
        return value

    return decode(packed["value"] if is_of_format_3 else json.loads(packed["text"]))


def stacked(tensors: Sequence[Tensor], max_bytes: float = math.inf) -> tuple[list[Block], list[int]]:
    """Return tensors as a few blocks: the numbers of those of one dtype and shape, and their data, stacked.

    Args:
        tensors: The tensors, which have to be dense.
        max_bytes: The size of the largest tensor to take.

    Returns:
        The blocks, and the numbers of all others: large ones, and what is no plain data on the CPU.
    """
    groups, blocks, others = dict[Any, list[int]](), list[Block](), list[int]()
    for number, traits in enumerate(map(_TRAITS, tensors)):
        groups.setdefault(traits, []).append(number)
    for (is_cpu, requires_grad, is_quantized, *_), numbers in groups.items():
        if is_cpu and not (requires_grad or is_quantized) and tensors[numbers[0]].nbytes <= max_bytes:
            blocks.append((numbers, torch.stack([tensors[number] for number in numbers])))
        else:
            others += numbers
    return blocks, others
