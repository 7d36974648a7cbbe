"""Sizes as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tricks._shared.text import format_bytes
from lightning_tricks.devices import list_gpus, select_gpus
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.small import cases


def parse_size(value):
    """Return the size of a GPU that a user has written so."""
    return list_gpus(nvml=FakeNvml([FakeGpu(memory_total=value)]))[0].memory_total or 0


@cases(
    "text, size",
    ("8GiB", 8 << 30),
    ("8 gib", 8 << 30),
    ("8GIB", 8 << 30),
    (" 8G ", 8 << 30),
    ("8GB", 8 * 10**9),
    ("0.5MiB", 1 << 19),
    ("1k", 1024),
    ("1KB", 1000),
    ("2TiB", 2 << 40),
    ("12", 12),
    ("12B", 12),
    (0, 0),
    (1.5e9, 1_500_000_000),
    ("0", 0),
)
def test_sizes(text, size):
    assert parse_size(text) == size


_NO_SIZES = ("", "GiB", "8 GiBs", "-1", -1, "8,5GiB", "1e9", "8 G iB", float("nan"), float("inf"), "\u0663GiB")


@pytest.mark.parametrize(
    ("value", "error"),
    [(value, ValueError) for value in _NO_SIZES] + [(value, TypeError) for value in (None, True, [8], b"8GiB")],
)
def test_what_is_no_size(value, error):
    with pytest.raises(error, match="min_free_memory must be a number of bytes, or text such as '8GiB'"):
        select_gpus(min_free_memory=value, nvml=FakeNvml())


@given(st.integers(0, 1 << 63))  # NVML says the largest number of 64 bits for a size that it does not know
def test_whole_numbers_are_kept(size):
    assert parse_size(size) == parse_size(str(size)) == size


@given(st.integers(0, 1 << 50))
def test_it_reads_what_is_printed(size):
    assert parse_size(format_bytes(size)) == pytest.approx(size, rel=1e-3)


@given(st.floats(0, 2.0**60))
def test_numbers_with_a_fraction(size):
    assert parse_size(size) == round(size)
