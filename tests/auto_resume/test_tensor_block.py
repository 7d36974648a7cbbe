"""Small tensors that are saved in one block: every one comes back, with memory of its own, and a lie is an error."""

import io
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks.auto_resume.core.tensor_block import pack, unpack
from tests.small import same

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]
SHAPES = [(), (1,), (3,), (2, 3), (4, 1, 2)]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.integers(0, 99),
)
VALUES = st.recursive(
    TENSORS
    | st.integers()
    | st.text(max_size=3)
    | st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([1 << 5000, -(1 << 5000), {1: 2}, (1, 2), (-(1 << 4097), 1), "tuple", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [found for part in parts for found in tensors(part)]


@given(VALUES)
@settings(max_examples=60)
def test_all_come_back_to_their_places(value):
    packed = pack(value)
    assert tensors(packed["others"]) == []
    found = unpack(through_a_file(packed))
    assert same(found, value)
    assert repr(found) == repr(value)  # the kinds of containers and numbers, too
    assert [one.dtype for one in tensors(found)] == [one.dtype for one in tensors(value)]
    memory = [one.untyped_storage() for one in tensors(found)]
    assert len({one.data_ptr() for one in memory}) == len(memory), "each has its own"
    assert all(one.nbytes() == kept.nbytes for one, kept in zip(memory, tensors(found), strict=True))


class Tagged(torch.Tensor):
    pass


OTHERS = {
    "large": torch.rand(5000),
    "empty": torch.empty(0, 3),
    "a parameter": nn.Parameter(torch.ones(2)),
    "with gradients": torch.ones(2, requires_grad=True),
    "transposed": torch.rand(3, 2).T,  # its order in memory may decide on the last bits of what is computed
    "complex": torch.ones(2, dtype=torch.complex64),
    "sparse": torch.eye(2).to_sparse(),
    "a subclass": torch.ones(2).as_subclass(Tagged),
    "meta": torch.ones(2, device="meta"),
    "in another container": OrderedDict(a=torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_small_and_plain_stays_as_it_is(name):
    value = {"it": OTHERS[name], "small": torch.ones(2)}
    packed = pack(value)
    assert packed["others"][0] is value["it"]
    assert unpack(packed)["it"] is value["it"]


def test_what_was_packed_before_is_packed_again():
    """As by a callback that keeps a checkpoint: the marks of one are not those of another."""
    value = {"kept": pack([torch.ones(2), torch.zeros(2)]), "mine": torch.ones(2)}
    found = unpack(through_a_file(pack(value)))
    assert same(unpack(found["kept"]), [torch.ones(2), torch.zeros(2)])
    assert same(found["mine"], torch.ones(2))


LIES = {
    1: ("complex64", "load", "float64"),
    2: ([4], [0], [-3], [1 << 62, 1 << 62], [True], ["3"]),
    3: (0, 3, 1, -2, 1 << 40, 2.0),
}


@pytest.mark.parametrize(("place", "lie"), [(place, lie) for place, lies in LIES.items() for lie in lies])
def test_a_description_of_another_block_is_an_error(place, lie):
    packed = pack([torch.ones(3), torch.zeros(3)])
    packed["kinds"][0][place] = lie
    with pytest.raises(ValueError, match="small tensors"):
        unpack(packed)
