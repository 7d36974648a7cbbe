"""A probe for each private symbol of memory; run with the oldest and the newest supported torch."""

import inspect
import pickle

import pytest
import torch

from lightning_tricks._torch_compat import memory
from tests.small import cases


class _Raises(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError


def test_subclasses_do_not_see_what_plain_tensors_are_asked():
    tensor = torch.zeros(3).as_subclass(_Raises)
    with pytest.raises(ZeroDivisionError):
        tensor.untyped_storage()
    with memory.as_plain_tensors():
        assert tensor.untyped_storage().nbytes() == 12
    with pytest.raises(ZeroDivisionError):
        tensor.untyped_storage()


def test_a_storage_is_told_from_others_and_not_copied():
    tensor = torch.zeros(3)
    identity = memory.storage_id(tensor.untyped_storage())
    assert memory.storage_id(tensor[1:].untyped_storage()) == identity
    assert memory.storage_id(torch.zeros(3).untyped_storage()) != identity
    lazy = torch._lazy_clone(tensor)
    memory.storage_id(lazy.untyped_storage())
    assert torch._C._is_cow_tensor(lazy)


@pytest.mark.filterwarnings("ignore:Sparse")
@cases("layout, count", (torch.strided, 0), (torch.sparse_coo, 2), (torch.sparse_csr, 3), (torch.sparse_csc, 3))
def test_parts_of_sparse_tensors(layout, count):
    tensor = torch.eye(4)
    tensor = tensor if layout is torch.strided else tensor.to_sparse(layout=layout)
    parts = memory.parts_of_sparse(tensor)
    assert len(parts) == count
    assert all(part.layout is torch.strided for part in parts)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_an_uncoalesced_tensor_stays_so():
    tensor = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert [tuple(part.shape) for part in memory.parts_of_sparse(tensor)] == [(1, 2), (2,)]
    assert not tensor.is_coalesced()


def test_recording_takes_the_arguments_that_are_given():
    """Without a GPU, the signature is all that can be asked."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history)
    recording.bind(stacks="python", max_entries=1)
    recording.bind(enabled=None)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("path")


@pytest.mark.gpu("only the real allocator has a history")
def test_a_recorded_history_holds_this_function(tmp_path):
    with memory.recording_memory_history():
        kept = torch.zeros(1 << 20, device="cuda")
        memory.dump_memory_snapshot(tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert "test_a_recorded_history_holds_this_function" in _functions(snapshot)
    del kept
    _allocate_later()
    assert "_allocate_later" not in _functions(torch.cuda.memory._snapshot())


def _allocate_later():
    return torch.zeros(1 << 20, device="cuda")


def _functions(snapshot):
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    return {frame["name"] for entry in entries for frame in entry.get("frames", ())}


@cases(
    "symbol, use",
    ("torch.cuda.memory._record_memory_history", lambda: memory.recording_memory_history().__enter__()),
    ("torch.cuda.memory._dump_snapshot", lambda: memory.dump_memory_snapshot("path")),
    ("torch._C.DisableTorchFunctionSubclass", memory.as_plain_tensors),
)
def test_a_renamed_symbol_is_named(symbol, use, monkeypatch):
    monkeypatch.delattr(symbol)
    with pytest.raises(RuntimeError, match=rf"does not work with torch .*{symbol.rpartition('.')[2]}"):
        use()
