"""`read_checkpoint`: every container, nothing run, and what a file is that is none."""

import argparse
import collections
import datetime
import enum
import functools
import gzip
import io
import json
import pickle
import random
import re
import tarfile
import zipfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from lightning_tricks import read_checkpoint, save_weights
from lightning_tricks._shared.read_budget import Budget, OverBudgetError
from lightning_tricks.checkpoint_remapping import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
)
from lightning_tricks.checkpoint_remapping.core.files.pickle_interpreter import read_pickle
from lightning_tricks.checkpoint_remapping.core.files.storages import FileStorages
from tests.small import cases, same, without_warnings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2).to(torch.bfloat16)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.scale = nn.Parameter(torch.randn(()))


def weights():
    return Net().state_dict()


def equal(left, right):
    assert {name: value.dtype for name, value in left.items()} == {name: value.dtype for name, value in right.items()}
    assert all(torch.equal(value, right[name]) for name, value in left.items())


class Loss(enum.IntEnum):
    L1 = 1


HONEST = {
    "root": Path("data"),
    "options": argparse.Namespace(lr=0.1),
    "names": np.array(["a", "b"]),
    "activation": functools.partial(nn.functional.gelu, approximate="tanh"),
    "loss": nn.CrossEntropyLoss(),
    "kind": Loss.L1,
    "begun": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    "limit": datetime.timedelta(hours=1),
    "counts": collections.defaultdict(list, a=[1]),
    "layer": nn.ReLU,
}
PLAIN = {
    "device": torch.device("cpu"),
    "dtype": torch.float16,
    "size": torch.Size([1, 2]),
    "ordered": collections.OrderedDict(a=1),
    "numbers": {1, 2.5, 1 + 2j, 10**30},
    "text": ("ü", b"\xff", bytearray(b"ab"), None, True, frozenset({1})),
    "count": collections.Counter("aab"),
    "lr": np.float64(0.1),
}


# Containers


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_save(zipped, protocol, mmap):
    expected = weights()
    torch.save(expected, "w.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    found = read_checkpoint("w.pt", mmap=mmap)
    equal(found.state_dict, expected)
    assert list(found.state_dict) == list(expected)
    assert (found.kind, found.placeholders, found.metadata) == ("state_dict", (), {})


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", ["zipped.pt", "plain.pt", "w.safetensors"])
def test_what_is_read_may_be_changed_and_the_file_stays(name, mmap):
    """Without a mapping, what is read stays when the file changes, too."""
    tensors = {**weights(), "long": torch.ones(5000)}
    if name.endswith(".pt"):
        torch.save(tensors, name, _use_new_zipfile_serialization=name == "zipped.pt")
    else:
        save_file(tensors, name)
    before = Path(name).read_bytes()
    found = read_checkpoint(name, mmap=mmap).state_dict
    for tensor in found.values():
        tensor.zero_()
    assert Path(name).read_bytes() == before
    if not mmap:
        with Path(name).open("r+b") as file:
            file.write(b"\1" * len(before))
        assert not found["long"].any()


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickle(protocol):
    """`pickle.dump` keeps each storage as a whole file of `torch.save`."""
    expected = weights()
    Path("w.pkl").write_bytes(pickle.dumps({"model": expected}, protocol=protocol))
    equal(read_checkpoint("w.pkl").state_dict, expected)
    assert read_checkpoint("w.pkl", map_location="meta").state_dict["scale"].is_meta
    Path("evil.pkl").write_bytes(pickle.dumps(Call(torch.storage._load_from_bytes, _instruction("REDUCE"))))
    with pytest.raises(UnsafeCheckpointError):
        read_checkpoint("evil.pkl")
    assert not Path("pwned").exists()


@pytest.mark.parametrize("key", ["state_dict", "model", "ema", "anything"])
def test_nested(key):
    expected = weights()
    torch.save({"epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, key: expected}, "w.pt")
    found = read_checkpoint("w.pt")
    equal(found.state_dict, expected)
    assert (found.kind, found.key, found.metadata["epoch"]) == ("nested", key, 3)
    torch.save({"pytorch-lightning_version": "2.5.0", key: expected}, "w.pt")
    assert read_checkpoint("w.pt").kind == ("lightning" if key == "state_dict" else "nested")
    assert key not in found.metadata


def test_lightning_says_where_the_weights_are_and_in_other_files_key_chooses():
    raw, averaged = weights(), weights()
    torch.save({"state_dict": raw, "ema": {"shadow": averaged}, "pytorch-lightning_version": "2.6.0"}, "w.pt")
    equal(read_checkpoint("w.pt").state_dict, raw)
    equal(read_checkpoint("w.pt", key="ema.shadow").state_dict, averaged)
    with pytest.raises(CheckpointError, match=r"key='nope'. Its weights are at state_dict, ema.shadow"):
        read_checkpoint("w.pt", key="nope")
    for beside in ({"ema": {"shadow": averaged}}, {"step": torch.ones(1)}):
        torch.save({"model": raw, **beside}, "w.pt")
        with pytest.raises(CheckpointError, match=r"several sets of weights. Choose one with key=: .*'model'"):
            read_checkpoint("w.pt")
        equal(read_checkpoint("w.pt", key="model").state_dict, raw)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_module_gives_its_tensors_and_names_its_class(zipped):
    net = Net()
    with without_warnings():  # torch before 2.6 looks for the source of classes
        torch.save(net, "net.pt", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint("net.pt")
    equal(found.state_dict, net.state_dict())
    assert found.kind == "model"
    assert [part.name for part in found.placeholders] == [f"{Net.__module__}.Net"]


def test_torchscript_and_data_parallel_inside_a_dict():
    net = Net()
    with without_warnings():  # torch 2.15 deprecates TorchScript
        torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).save("script.pt")
    assert read_checkpoint("script.pt").kind == "torchscript"
    assert read_checkpoint("script.pt").state_dict["1.running_var"].shape == (3,)
    torch.save({"model": nn.DataParallel(net), "epoch": 1}, "wrapped.pt")
    equal(read_checkpoint("wrapped.pt").state_dict, {f"module.{n}": t for n, t in net.state_dict().items()})


def test_safetensors_and_shards():
    expected = weights()
    save_weights(expected, "w.safetensors", metadata={"author": "us"})
    found = read_checkpoint("w.safetensors")
    equal(found.state_dict, expected)
    assert (found.kind, found.metadata["author"]) == ("safetensors", "us")
    names = list(expected)
    save_file({name: expected[name] for name in names[:4]}, "1.safetensors")
    torch.save({name: expected[name] for name in names[4:]}, "2.bin")
    places = {name: "1.safetensors" if i < 4 else "2.bin" for i, name in enumerate(names)}
    Path("model.safetensors.index.json").write_text(json.dumps({"metadata": {"n": 1}, "weight_map": places}))
    found = read_checkpoint("model.safetensors.index.json")
    equal(found.state_dict, expected)
    assert (found.kind, list(found.state_dict)) == ("sharded", names)
    Path("2.bin").unlink()
    with pytest.raises(NotACheckpointError, match=r"shard 2.bin is missing in its folder"):
        read_checkpoint("model.safetensors.index.json")
    Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../1.safetensors"}}))
    with pytest.raises(NotACheckpointError, match="not the name of a file in its folder"):
        read_checkpoint("model.safetensors.index.json")


def test_views_ties_and_other_layouts():
    base = torch.arange(24.0)
    special = {
        "tied": base[:6],
        "same": base[:6],
        "strided": base.view(4, 6).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "half": torch.ones(3, dtype=torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
        "with state": _with_attribute(torch.ones(2)),
    }
    torch.save(special, "w.pt")
    found = read_checkpoint("w.pt").state_dict
    assert found["tied"].data_ptr() == found["same"].data_ptr() == found["strided"].data_ptr()
    assert found["strided"].stride() == (1, 6)
    for name, value in special.items():
        assert torch.equal(found[name].to(torch.complex64), value.detach().to(torch.complex64))
        assert type(found[name]) is torch.Tensor
        assert not found[name].requires_grad


def _with_attribute(tensor):
    tensor.note = "kept by torch.save"
    return tensor


@pytest.mark.parametrize("name", ["w.pt", "old.pt", "w.safetensors"])
def test_map_location(name):
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4), "c": torch.ones(2).to(torch.float8_e5m2fnuz)}
    if name == "w.safetensors":
        save_weights(tensors, name)
    else:
        torch.save(tensors, name, _use_new_zipfile_serialization=name == "w.pt")
    for location, device in {"cpu": "cpu", torch.device("meta"): "meta", "meta": "meta", None: "cpu"}.items():
        found = read_checkpoint(name, map_location=location).state_dict
        assert {tensor.device.type for tensor in found.values()} == {device}
        assert found["a"].shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"not read to 'cuda:7', which is unavailable: pass map_location='cpu'"):
        read_checkpoint(name, map_location="cuda:7")
    with pytest.raises(TypeError, match="map_location must be a device or None"):
        read_checkpoint(name, map_location={"cpu": "meta"})
    if name == "old.pt":  # a device that is not there
        Path(name).write_bytes(Path(name).read_bytes().replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00xpu"))
        assert torch.equal(read_checkpoint(name, map_location=None).state_dict["a"], tensors["a"])


# Arrays of NumPy


def _arrays(tensors):
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def _as_numpy_1(data):
    """A pickle as NumPy 1 writes it."""
    return data.replace(b"numpy._core", b"numpy.core")  # names of protocols 0 to 3 end with a line, not a length


def _as_python_2(data):
    """A pickle of protocol 2 as Python 2 writes it: bytes are text there, without a call that encodes them."""
    call = re.escape(b"h\x03X") + b"(....)(.*?)" + re.escape(b"q\x11h\x05\x86q\x12Rq\x13")
    made = re.search(call, data, re.DOTALL)
    text = made[2].decode().encode("latin-1")
    return data[: made.start()] + b"T" + len(text).to_bytes(4, "little") + text + data[made.end() :]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("container", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("inside", ["model", "anything", None])
def test_arrays_of_numpy_are_weights(protocol, container, inside):
    """As in the .pkl of model zoos and in .pdparams; what stands beside them stays what it is."""
    expected = {name: tensor.float() for name, tensor in weights().items()}
    arrays = _arrays(expected)
    value = {inside: arrays, "author": "a zoo", "best": np.float32(0.5)} if inside else arrays
    if container == "pickle":
        Path("w").write_bytes(pickle.dumps(value, protocol=protocol))
    else:
        torch.save(value, "w", pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    found = read_checkpoint("w")
    equal(found.state_dict, expected)
    assert found.key == (inside or "")
    assert found.metadata == ({"author": "a zoo", "best": 0.5} if inside else {})
    assert type(found.metadata.get("best", np.float32())) is np.float32
    assert read_checkpoint("w", map_location="meta").state_dict["head.weight"].is_meta
    assert torch.equal(read_checkpoint("w").state_dict["head.weight"], expected["head.weight"])
    with pytest.raises(CheckpointError, match="which is unavailable"):
        read_checkpoint("w", map_location="cuda:7")


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "<f2", ">f4", "=f8", "<c8", ">u2", ">i4"])
def test_arrays_of_any_numbers_and_layout(dtype, protocol):
    plain = np.arange(24).reshape(2, 3, 4).astype(dtype)
    shared = plain[0].copy()
    arrays = {
        "plain": plain, "columns": np.asfortranarray(plain), "turned": plain.transpose(1, 0, 2), "part": plain[:, ::2],
        "number": np.array(plain[1, 1, 1]), "empty": plain[:0], "shared": shared, "again": shared,
    }  # fmt: skip
    Path("w.pkl").write_bytes(pickle.dumps({"w": arrays}, protocol=protocol))
    found = read_checkpoint("w.pkl").state_dict
    assert {name: tensor.numpy().tolist() for name, tensor in found.items()} == {
        n: a.tolist() for n, a in arrays.items()
    }
    assert all(tensor.numpy().dtype == plain.dtype.newbyteorder("=") for tensor in found.values())
    assert found["shared"].data_ptr() == found["again"].data_ptr()


def test_arrays_of_older_pythons_and_of_another_numpy():
    array = np.linspace(-1, 1, 70).astype("f4").reshape(7, 10)
    Path("2.pkl").write_bytes(
        _as_python_2(_as_numpy_1(pickle.dumps(array, protocol=2)[:-1]).join([b"\x80\x02}X\x01\x00\x00\x00a", b"s."]))
    )
    assert read_checkpoint("2.pkl").state_dict["a"].tolist() == array.tolist()
    for protocol in (0, 2):
        Path("1.pkl").write_bytes(_as_numpy_1(pickle.dumps({"a": array}, protocol=protocol)))
        assert read_checkpoint("1.pkl").state_dict["a"].tolist() == array.tolist()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("values", [np.array([None, "a"]), np.zeros(2, "f4,i4"), np.zeros(2, np.longdouble)])
def test_arrays_of_no_numbers_are_placeholders(values, protocol):
    Path("w.pkl").write_bytes(pickle.dumps({"w": values}, protocol=protocol))
    with pytest.raises(NotACheckpointError, match="a checkpoint without weights: it holds w"):
        read_checkpoint("w.pkl")
    for file, place in (({"w": values, "b": np.ones(2)}, "w"), ({"model": {"b": np.ones(2)}, "x": values}, "x")):
        Path("w.pkl").write_bytes(pickle.dumps(file, protocol=protocol))
        found = read_checkpoint("w.pkl")
        assert (list(found.state_dict), [part.location for part in found.placeholders]) == (["b"], [place])


def test_arrays_beside_tensors_are_no_second_set_of_weights():
    torch.save({"policy": weights(), "observations": {"mean": np.ones(3)}, "scale": np.ones(1)}, "w.pt")
    found = read_checkpoint("w.pt")
    equal(found.state_dict, weights() | found.state_dict)
    assert found.key == "policy"
    assert found.metadata["observations"]["mean"].tolist() == [1, 1, 1]


# Never a call, never an import


@pytest.mark.trap("checkpoints: honest hyper-parameters are refused by weights_only")
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_honest_values_become_placeholders(protocol):
    expected = weights()
    file = {"pytorch-lightning_version": "2.6.0", "state_dict": expected, "hyper_parameters": {**HONEST, **PLAIN}}
    torch.save(file, "w.ckpt", pickle_protocol=protocol)
    found = read_checkpoint("w.ckpt")
    equal(found.state_dict, expected)
    assert found.kind == "lightning"
    assert {part.location for part in found.placeholders} == {f"hyper_parameters.{name}" for name in HONEST}
    names = {part.location.partition(".")[2]: part.name for part in found.placeholders}
    assert names["root"].startswith("pathlib.")
    assert names["loss"] == "torch.nn.modules.loss.CrossEntropyLoss"
    assert {name: found.metadata["hyper_parameters"][name] for name in PLAIN} == PLAIN


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class Trap:
    """Its very construction leaves a trace: by BUILD, or by being looked up."""

    def __setstate__(self, state):
        Path("pwned").touch()

    def __getstate__(self):
        return {"a": 1}


def _instruction(text):
    """A pickle in protocol 0, by hand, that calls a function by INST, OBJ, REDUCE or through getattr."""
    return {
        "INST": b"(S'touch pwned'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'touch pwned'\no.",
        "REDUCE": b"cos\nsystem\n(S'touch pwned'\ntR.",
        "nested": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch pwned'\ntR.",
        "BUILD on a class": b"ccollections\nOrderedDict\n(dS'__init__'\ncos\nsystem\nsb.",
        "extension": b"\x80\x02\x82\x01.",
        "dotted": b"\x80\x04\x8c\x07pathlib\x8c\x0aPath.touch\x93\x8c\x05pwned\x85R.",
        "runpy": b"crunpy\nrun_path\n(S'evil.py'\ntR.",
        "torch.load": b"ctorch\nload\n(S'evil.pt'\ntR.",
        "numpy": b"cnumpy.testing._private.utils\nrunstring\n(S'import os'\n}tR.",
    }[text]


@pytest.mark.trap("checkpoints: os.system runs from an address, and with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
@pytest.mark.parametrize("container", ["zip", "legacy", *range(6)])
@pytest.mark.parametrize("beside_weights", [True, False])
def test_calls_are_refused(container, beside_weights, monkeypatch):
    import os

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    value = {"state_dict": {"w": [1.0]}, "x": Call(os.system, "touch pwned")}
    if beside_weights and isinstance(container, str):
        value["state_dict"] = weights()
    if isinstance(container, int):
        Path("evil.pt").write_bytes(pickle.dumps(value, protocol=container))
    else:
        torch.save(value, "evil.pt", _use_new_zipfile_serialization=container == "zip")
    with pytest.raises(UnsafeCheckpointError, match=r"asks to call (posix|nt).system. Nothing of it was run") as error:
        read_checkpoint("evil.pt")
    assert "weights_only" not in str(error.value)
    assert not Path("pwned").exists()


@cases(
    "how, error",
    *((how, "Nothing of it was run") for how in ("INST", "OBJ", "REDUCE", "nested", "BUILD on a class")),
    *((how, "Nothing of it was run") for how in ("extension", "runpy")),
    *((how, "a pickled .*, not a state dict") for how in ("dotted", "torch.load", "numpy")),
)
def test_handmade_pickles_are_refused(how, error):
    Path("evil.pkl").write_bytes(_instruction(how))
    Path("evil.py").write_text("import pathlib; pathlib.Path('pwned').touch()")
    expected = UnsafeCheckpointError if error == "Nothing of it was run" else NotACheckpointError
    with pytest.raises(expected, match=error):
        read_checkpoint("evil.pkl")
    with zipfile.ZipFile("evil.pt", "w") as archive:
        archive.writestr("archive/data.pkl", _instruction(how))
        archive.writestr("archive/version", "3\n")
    with pytest.raises(expected, match=error):
        read_checkpoint("evil.pt")
    assert not Path("pwned").exists()


@pytest.mark.parametrize("protocol", range(1, 6))
def test_unknown_classes_stay_inert(protocol):
    expected = weights()
    torch.save({"model": expected, "trap": Trap(), "call": Call(_touch, "pwned")}, "w.pt", pickle_protocol=protocol)
    found = read_checkpoint("w.pt")
    equal(found.state_dict, expected)
    assert [part.name for part in found.placeholders] == [f"{__name__}.Trap", f"{__name__}._touch"]
    assert not Path("pwned").exists()


def _touch(name):
    Path(name).touch()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(VALUES, st.sampled_from(range(6)))
@settings(max_examples=200)
def test_plain_values_are_those_of_pickle(value, protocol):
    assert read_pickle(io.BytesIO(pickle.dumps(value, protocol=protocol)), Budget(0)) == value


def test_plain_values_are_charged_before_they_fill_the_memory():
    """A few bytes that ask for much are stopped before a few hundred KiB more are made."""
    many = b"\x80\x02]q\x00(" + b"h\x00" * 30_000_000 + b"e."
    with pytest.raises(OverBudgetError, match="takes more than 41,943,040 bytes of memory"):
        read_pickle(io.BytesIO(many), Budget(0))


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_give_a_checkpoint_error(data):
    Path("w.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"^w.pt is "):
        read_checkpoint("w.pt")


# What is no checkpoint


def _archive():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.pt"))
    return file.getvalue()


def _npz():
    file = io.BytesIO()
    np.savez(file, a=np.ones(3))
    return file.getvalue()


def _zip(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    return file.getvalue()


NOT_CHECKPOINTS = [
    (b"", "an empty file"),
    (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    (b"\n  <HTML>", "an HTML page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-LFS pointer. Run `git lfs pull`"),
    (gzip.compress(b"weights"), "a compressed archive. Unpack it"),
    (_archive(), "a compressed archive"),
    (_npz(), r"a zip archive without a checkpoint in it \(it holds a.npy\)"),
    (
        _zip("metadata.json", "model.weights.h5"),
        r"a zip archive without a checkpoint in it \(it holds metadata.json, model.weights.h5",
    ),
    (b"\x89HDF\r\n\x1a\n" + bytes(88), "an HDF5 file, as Keras writes them. Convert it to .safetensors"),
    (b"GGUF\x03\x00\x00\x00" + bytes(16), "a GGUF file, whose weights are quantized. Take the"),
    (b"hello world, this is a readme\n", "a text file, which begins with 'hello world"),
    (b'{"error": "not found"}', "a JSON file without a weight_map"),
    (bytes(range(100, 200)), "not in a format of weights that this reader knows"),
    (pickle.dumps([1, 2]), "a pickled list, not a state dict"),
    (pickle.dumps({"epoch": 3}), "a checkpoint without weights: it holds epoch"),
    (pickle.dumps({"a": [1, 2]})[:-3], "a pickle that is .*truncated.*Download it again"),
]


@pytest.mark.trap("checkpoints: an HTML page, a git-LFS pointer, ... advise weights_only=False")
@pytest.mark.parametrize(("data", "words"), NOT_CHECKPOINTS, ids=[words for _, words in NOT_CHECKPOINTS])
def test_what_it_is(data, words):
    Path("model.onnx").write_bytes(data)
    with pytest.raises(NotACheckpointError, match=f"^model.onnx is {words}") as error:
        read_checkpoint("model.onnx")
    assert "weights_only" not in str(error.value)


def test_an_optimizer_alone():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for value in (optimizer.state_dict(), {"optimizer": optimizer.state_dict(), "epoch": 1}):
        torch.save(value, "w.pt")
        with pytest.raises(NotACheckpointError, match=r"a checkpoint of an optimizer, without a model's weights"):
            read_checkpoint("w.pt")


def test_directories_and_missing_files():
    with pytest.raises(MissingCheckpointError, match=r"weights.pth does not exist. Is the path right"):
        read_checkpoint("weights.pth")
    torch.save(weights(), "weights.pt")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'weights.pt'"):
        read_checkpoint("weights.pth")
    with pytest.raises(NotACheckpointError, match=r"a directory. Give a file in it, such as weights.pt"):
        read_checkpoint(".")


def test_directories_of_torch_distributed_checkpoint():
    import torch.distributed.checkpoint as dcp

    with without_warnings():  # it warns that there is one process
        dcp.save({"a": torch.ones(2)}, checkpoint_id="sharded")
    with pytest.raises(NotACheckpointError, match=r"torch.distributed.checkpoint.format_utils dcp_to_torch sharded"):
        read_checkpoint("sharded")


@pytest.mark.parametrize("entry", ["state_dict", "model"])
def test_folders_of_shards_of_lightning(entry):
    """As ModelParallelStrategy and FSDPStrategy write them; nothing of a hostile or damaged one is run or allocated."""
    import torch.distributed.checkpoint as dcp

    stored = {entry: weights(), "optimizer_0": {"state": {"a": torch.ones(2)}}}
    with without_warnings():
        dcp.save(stored, checkpoint_id="folder")
    torch.save({"pytorch-lightning_version": "2.6", "epoch": 3}, "folder/meta.pt")
    checkpoint = read_checkpoint("folder", map_location="meta" if entry == "model" else "cpu")
    assert (checkpoint.kind, checkpoint.metadata["epoch"]) == ("lightning", 3)
    if entry == "model":
        assert {tensor.device.type for tensor in checkpoint.state_dict.values()} == {"meta"}
        return
    assert same(checkpoint.state_dict, dict(stored[entry]))
    whole = Path("folder/.metadata").read_bytes()
    Path("folder/.metadata").write_bytes(b"cos\nmkdir\n(S'called'\ntR.")
    with pytest.raises(NotACheckpointError, match=r"contain os\.mkdir, which is not allowed there"):
        read_checkpoint("folder")
    assert not Path("called").exists()
    metadata = pickle.loads(whole)
    for each in metadata.state_dict_metadata.values():
        each.size = torch.Size([10**9, 10**3])
    Path("folder/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotACheckpointError, match="its shards would be larger than its files"):
        read_checkpoint("folder")
    Path("folder/.metadata").write_bytes(whole)
    Path("folder/__0_0.distcp").write_bytes(Path("folder/__0_0.distcp").read_bytes()[:1000])
    with pytest.raises(NotACheckpointError, match="folder is corrupt or truncated"):
        read_checkpoint("folder")


@pytest.mark.trap("checkpoints: a truncated file raises miniz's error, an empty one EOFError without a word")
@pytest.mark.parametrize("name", ["w.pt", "old.pt", "w.safetensors", "net.pkl"])
def test_truncated_at_any_byte(name):
    if name == "w.safetensors":
        save_weights(Net(), name)
    elif name == "net.pkl":
        Path(name).write_bytes(pickle.dumps({"a": list(range(300)), "b": HONEST["root"]}))
    else:
        torch.save(weights(), name, _use_new_zipfile_serialization=name == "w.pt")
    whole = Path(name).read_bytes()
    offsets = random.Random(0).sample(range(len(whole)), min(200, len(whole)))
    for offset in offsets:
        Path("cut").write_bytes(whole[:offset])
        with pytest.raises(NotACheckpointError) as error:
            read_checkpoint("cut")
        assert "weights_only" not in str(error.value)


def test_a_file_that_gets_shorter_while_it_is_read():
    """Otherwise the rest of the tensor would be what was in the memory before."""
    Path("w").write_bytes(bytes(64))
    storages = FileStorages(Path("w"), "cpu", mmap=False, budget=Budget(0))
    assert storages.part(0, 64).nbytes() == 64
    Path("w").write_bytes(bytes(63))
    with pytest.raises(NotACheckpointError, match="truncated"):
        storages.part(0, 64)


@pytest.mark.parametrize("claimed", [b"\x05", b"\x64"])
def test_tensors_beyond_their_data(claimed):
    """A tensor that claims more than its storage is refused: torch would give it memory that is not its own."""
    torch.save({"w": torch.ones(4)}, "w.pt")
    with zipfile.ZipFile("w.pt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in parts if name.endswith("data.pkl"))
    parts[pickled] = parts[pickled].replace(b"K\x04\x85", b"K" + claimed + b"\x85")
    with zipfile.ZipFile("w.pt", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    with pytest.raises(NotACheckpointError, match="a tensor that is larger than its data"):
        read_checkpoint("w.pt")


@cases(
    "error, words",
    (ImportError("Install s3fs"), r"s3:// needs the extra 's3': pip install .*"),
    (FileNotFoundError("bucket/w.pt"), r"it does not exist \(bucket/w\.pt\)\."),
    (PermissionError("Forbidden."), r"Forbidden\."),
)
def test_an_address_that_cannot_be_opened_is_told_and_draws_no_random_number(error, words):
    def fails(*_):
        random.random()  # as botocore does for the delay of a retry
        raise error

    before = random.getstate()
    with (
        patch("fsspec.open", fails),
        pytest.raises(MissingCheckpointError, match=rf"^s3://b/w\.pt cannot .*: {words}$"),
    ):
        read_checkpoint("s3://b/w.pt")
    assert random.getstate() == before
