"""Fingerprints see each bit and the order: against a reference, by properties, and for all that a batch may hold."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
from collections import UserDict, deque, namedtuple
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from lightning_tricks.run_fingerprint import fingerprint
from tests.emulated_cuda.device import EmulatedCuda
from tests.small import HostReads, cases

SHORT, LONG, ROW, ROWS = 2_048, 262_144, 32_749, (509, 521)
MASK = 2**64 - 1


def number(value):
    return fingerprint(value).item()


def slow_hash(*memories: bytes) -> int:
    """The fingerprint of memory in plain integers: words, or sums of them by rows; numbered, mixed, added up."""
    found, total = [], 0
    for data in memories:
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
        if len(words) > LONG:
            words = [sum(words[at::ROW]) & MASK for at in range(ROW)]
        if len(words) > SHORT:
            whole = [len(words) - len(words) % length for length in ROWS]
            sums = [sum(words[at:end:row]) & MASK for row, end in zip(ROWS, whole, strict=True) for at in range(row)]
            words = sums + words[min(whole) :]
        found += words
        if len(data) % 8:
            found.append(int.from_bytes(data[-(len(data) % 8) :], "little"))  # a float32 of positive sign
    for position, word in enumerate(found):
        mixed = (word + position * 0x9E3779B97F4A7C15) & MASK
        signed = mixed - 2**64 if mixed >> 63 else mixed
        mixed = ((mixed ^ (signed >> 32) & MASK) * 0xFF51AFD7ED558CCD) & MASK
        signed = mixed - 2**64 if mixed >> 63 else mixed
        total += mixed ^ (signed >> 29) & MASK
    return total & MASK


def memory_hash(tensors):
    """What a fingerprint says of memory alone, without names and shapes."""
    from lightning_tricks.run_fingerprint.core.fingerprint import Mixer, condense

    mixer = Mixer()
    mixer.add([condense(tensors).words])
    return mixer.take().item() & MASK


@pytest.mark.parametrize("elements", [0, 1, 2, 3, 1000, 2 * SHORT, 2 * SHORT + 1, 2 * ROW, 2 * LONG, 2 * LONG + 12345])
def test_agrees_with_the_reference_implementation(elements):
    x = torch.rand(elements, generator=torch.Generator().manual_seed(elements))
    assert memory_hash([x]) == slow_hash(x.numpy().tobytes())


def test_short_tensors_count_as_if_they_lay_one_after_another_and_others_by_themselves():
    tensors = [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in (1, 5, 9000, 3, 8001, 900)]
    short, long = [x.numpy().tobytes() for x in tensors if len(x) < 2 * SHORT], (tensors[2], tensors[4])
    assert memory_hash(tensors) == slow_hash(*(x.numpy().tobytes() for x in long), b"".join(short))


@pytest.mark.parametrize("elements", [2, SHORT, 3 * SHORT, 3 * LONG])
def test_two_tensors_of_one_shape_that_change_places_are_seen(elements):
    first, second = torch.rand(2, elements, generator=torch.Generator().manual_seed(elements))
    assert number([first, second]) != number([second, first])


@given(st.data())
@settings(max_examples=60)
def test_each_bit_counts(data):
    size = data.draw(st.sampled_from([1, 7, 64, 5000, 3 * ROW, 2 * LONG + 7]))
    x = torch.arange(size, dtype=torch.float32)
    before = number(x)
    bit = data.draw(st.integers(0, 32 * size - 1))
    x.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert number(x) != before


@given(st.data())
@settings(max_examples=60)
def test_order_counts(data):
    """Two elements that change places are seen, even if but the highest bit of a word differs."""
    size = data.draw(st.sampled_from([2, 64, 5000, 4 * ROW, 2 * LONG, 2 * LONG + 7]))
    x = torch.ones(size) if data.draw(st.booleans()) else torch.arange(size, dtype=torch.float32)
    first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    assume(
        size <= 2 * LONG + 1 or (first - second) % (2 * ROW)
    )  # the distance at which it is blind, as its docstring says
    x[first] = -1.5
    before = number(x)
    x[first], x[second] = x[second].item(), -1.5
    assert number(x) != before


@pytest.mark.parametrize(("words", "distance"), [(SHORT + 1, 509), (SHORT + 1, 2 * 521), (LONG, 17 * 509), (LONG, ROW)])
def test_samples_that_fall_together_in_rows_of_one_length_are_told_apart_by_the_other(words, distance):
    """Even if one is a permutation of the other, so that their sums are equal."""
    x = torch.zeros(words, 2)
    first, second = torch.arange(3), torch.arange(3) + distance
    x[first], x[second] = torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([[0.0], [1.0], [2.0]])
    swapped = x.clone()
    swapped[first], swapped[second] = x[second], x[first]
    assert number(swapped) != number(x)


@pytest.mark.trap("resume: xor and sum ignore element order: a permutation goes unseen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_permutations_are_seen(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2, (400, 500), generator=generator).to(dtype)
    swapped_rows, permuted = x.clone(), x.flatten()[torch.randperm(x.numel(), generator=generator)].view(x.shape)
    swapped_rows[[3, 4]] = x[[4, 3]]
    assert len({number(x), number(swapped_rows), number(permuted), number(x.flip(0)), number(x.flip(1))}) == 5
    assert x.sum() == permuted.sum()
    identity = torch.eye(300).to(dtype)
    assert number(identity) != number(identity[torch.randperm(300, generator=generator)])


def test_equal_values_are_equal_however_they_lie_in_memory():
    x = torch.randn(64, 3, 33, 34, generator=torch.Generator().manual_seed(0))
    channels_last = x.to(memory_format=torch.channels_last)
    offset = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)
    every_second = torch.stack([x, x])[:: 1 + 1].squeeze(0)
    assert len({number(each) for each in (x, channels_last, offset, every_second, x.clone().requires_grad_())}) == 1
    z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert number(z.conj()) == number(z.conj().resolve_conj()) != number(z)
    assert number(z.conj().imag) == number(z.conj().imag.clone())  # a view whose sign is to be turned


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_long_part_of_a_tensor_counts_the_same_wherever_it_starts(dtype):
    values = torch.arange(8 * ROW + 8).remainder(251).to(dtype)
    for start in (1, 2, 4, 8):
        part = values[start : start + 8 * ROW + 8 - 8]
        assert number(part) == number(part.clone())


def test_shapes_dtypes_names_and_signs_of_zero_count():
    x = torch.zeros(4, 6)
    distinct = [x, x.view(6, 4), x.double(), -x, {"a": x}, {"b": x}, [x], [x, torch.zeros(0)], torch.zeros(0), [], {}]
    assert len({number(each) for each in distinct}) == len(distinct) - 1  # an empty list and an empty dict are nothing
    assert number(torch.tensor(float("nan"))) == number(torch.tensor(float("nan")))


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: str


class Plain:
    def __init__(self, x):
        self.x = x
        self.itself = self


class Color(enum.Enum):
    RED = 1
    GREEN = 2


Pair = namedtuple("Pair", "left right")


@cases(
    "make",
    lambda x, t: {"x": x, "t": t},
    lambda x, t: UserDict(x=x, t=t),
    lambda x, t: Sample(x, t),
    lambda x, t: Plain([x, (t, None)]),
    lambda x, t: Pair(x, t),
    lambda x, t: [x.numpy(), {t}],
    lambda x, t: [np.float64(x[0].item()), x.tolist(), t],
    lambda x, t: [x, pathlib.Path(t)],
    lambda x, t: [x, np.array([t], dtype=object)],
    lambda x, t: [x.to_sparse(), t],
    lambda x, t: [x.view(1, 2).to_sparse_csr(), t],
    lambda x, t: [torch.nested.nested_tensor([x, x[:1]]), t],
    lambda x, t: [torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), t],
    ids=range(13),
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse CSR:UserWarning", "ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_any_container_of_tensors(make):
    base = number(make(torch.tensor([1.0, 2.0]), "a"))
    assert base == number(make(torch.tensor([1.0, 2.0]), "a"))
    assert base != number(make(torch.tensor([1.0, 3.0]), "a"))
    assert base != number(make(torch.tensor([1.0, 2.0]), "b"))


@dataclasses.dataclass(slots=True)
class Slotted:
    image: torch.Tensor
    label: str


class Private:
    __slots__ = ("__image", "__weakref__", "label")

    def __init__(self, image, label):
        self.__image, self.label = image, label


class Called(Plain):
    def __call__(self):
        """Do what the batches of some libraries do when they are called."""


@cases(
    "make",
    lambda number: Slotted(torch.tensor(number), "a"),
    lambda number: Private(torch.tensor(number), "a"),
    lambda number: Called(torch.tensor(number)),
    lambda number: deque([torch.tensor(number)]),
    lambda number: [Image.new("L", (2, 2), number)],
    lambda number: np.array(f"2000-01-0{number}", dtype="datetime64"),
    lambda number: [np.datetime64(f"2000-01-0{number}")],
    lambda number: [datetime.date(2000, 1, number)],
    lambda number: [Decimal(number) / 3, range(number)],
    lambda number: bytearray([number]),
    ids=range(10),
)
def test_values_that_no_attribute_shows_count(make):
    assert number(make(1)) == number(make(1))
    assert number(make(1)) != number(make(2))


def test_sets_enums_functions_and_objects_have_no_addresses_in_them():
    assert number({"b", "a", "c"}) == number({"c", "b", "a"})
    assert number(Color.RED) != number(Color.GREEN)
    assert number([object(), len, nn.Linear(2, 2), lambda: 1]) == number([object(), len, nn.Linear(2, 2), lambda: 2])


def test_reads_nothing_back_and_leaves_no_graph():
    layer = nn.Linear(300, 300)
    loss = layer(torch.ones(2, 300)).sum()
    with HostReads() as reads:
        seen = fingerprint({"loss": loss, **dict(layer.named_parameters())})
    assert reads.count == 0
    assert (seen.dtype, seen.shape, seen.requires_grad) == (torch.int64, (), False)
    loss.backward()


def test_rows_that_are_mixed_together_are_those_that_are_mixed_alone():
    """Also where the lengths change, and where more words wait than are mixed at once."""
    from lightning_tricks.run_fingerprint.core.fingerprint import Mixer, condense

    generator, mixer = torch.Generator().manual_seed(0), Mixer()
    sizes = [(3, 5000)] * 30 + [(5000, 3), (3, 5000), (0, 1), (3, 40 * LONG)] + [(3, 5000)] * 2
    rows = [[torch.rand(size, generator=generator) for size in of_row] for of_row in sizes]
    condensed = [[condense(value) for value in row] for row in rows]
    for row in condensed:
        mixer.add([value.words for value in row])
    seen = mixer.take() + torch.tensor([[value.description for value in row] for row in condensed])
    assert seen.tolist() == [[number(value) for value in row] for row in rows]


def test_meta_tensors_have_a_shape_and_no_memory():
    assert number(torch.empty(3, device="meta")) != number(torch.empty(4, device="meta"))


def test_tensors_of_each_device_count():
    """A model may lie on several devices: what lies on one of them is no less a part of the fingerprint."""
    values = ((1, 2, 3), (1, 2, 3), (7, 2, 3), (1, 7, 3), (1, 2, 7), (1, 3, 2))
    devices = ("cpu", "cuda", "cuda:1")
    with EmulatedCuda():
        seen = [
            fingerprint([torch.tensor(one, device=at) for one, at in zip(of, devices, strict=True)]) for of in values
        ]
        assert {one.device for one in seen} == {torch.device("cuda:0")}
        numbers = [one.item() for one in seen]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 5
