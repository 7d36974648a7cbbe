"""Small files that ask for much: one of each class that is known, made by hand."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable

import torch

from tests.small import without_warnings

Files = dict[str, bytes]

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
ORDERED = b"ccollections\nOrderedDict\n"


def text(value: str) -> bytes:
    """Return the instruction that pushes a string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    """Return the instruction that pushes a whole number."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def doubled(times: int = 60, once: bytes = b"2\x86") -> bytes:
    """Return a tuple that holds the one before it twice, and so on: as text it fills any memory."""
    return b")" + once * times


def shared_lists(times: int = 60) -> bytes:
    """Return a list that holds the one before it twice, and so on."""
    return b"]" + b"q\x010](h\x01h\x01e" * times


def called(name: str, *arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def tensor(size: bytes, stride: bytes, offset: bytes = b"K\x00") -> bytes:
    """Return a tensor over a storage of four floats."""
    return TENSOR + b"(" + STORAGE + offset + size + stride + b"\x89" + ORDERED + b")RtR"


WEIGHT = tensor(b"K\x04\x85", b"K\x01\x85")


def beside(value: bytes, key: str = "x") -> bytes:
    """Return a pickle of weights with a value beside them."""
    return b"\x80\x02}(" + text("state_dict") + b"}" + text("w") + WEIGHT + b"s" + text(key) + value + b"u."


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    """Return a file as torch.save writes it, with a storage of four floats."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, data in {"data.pkl": pickled, "data/0": bytes(16), "version": b"3\n", **records}.items():
            made.writestr(f"archive/{name}", data)
    return file.getvalue()


def _modules(times: int) -> bytes:
    """Return modules of which each holds the one before it twice."""
    module = b"capp\nNet\n)R}(" + text("_parameters") + b"}" + text("w") + WEIGHT + b"s" + text("_modules") + b"}ub"
    for _ in range(times):
        module = kept(1, module) + b"capp\nNet\n)R}" + text("_modules")
        module += b"}(" + text("a") + b"h\x01" + text("b") + b"h\x01u" + b"sb"
    return b"\x80\x02" + module + b"."


def kept(place: int, *values: bytes) -> bytes:
    """Return what puts a value at a place of the memo, and takes it from the stack."""
    return b"".join(values) + b"q" + bytes([place]) + b"0"


def _names(count: int, value: bytes = b"N") -> bytes:
    return b"}(" + b"".join(text(str(n)) + value for n in range(count)) + b"u"


def _many(pushed: bytes, times: int) -> bytes:
    return b"](" + pushed * times + b"e"


# Pickles, which are put into archives; each of them is beside weights

PICKLES: dict[str, Callable[[], bytes]] = {
    "text of shared lists: a class": lambda: beside(shared_lists() + text("x") + b"\x93"),
    "text of shared lists: a storage": lambda: beside(STORAGE.replace(b"X\x01\x00\x00\x000", shared_lists())),
    "text of shared lists: a place": lambda: beside(STORAGE.replace(b"X\x03\x00\x00\x00cpu", shared_lists())),
    "text of shared lists: a kind": lambda: beside(STORAGE.replace(b"ctorch\nFloatStorage\n", shared_lists())),
    "text of shared lists: a device": lambda: beside(called("torch.device", shared_lists())),
    "text of shared lists: an encoding": lambda: beside(called("_codecs.encode", text("a"), shared_lists())),
    "text of shared lists: a function": lambda: beside(shared_lists() + b")R"),
    "text of shared lists: changes": lambda: beside(shared_lists() + b"}b"),
    "shared dicts": lambda: beside(b"}" + (b"q\x010}(" + text("a") + b"h\x01" + text("b") + b"h\x01u") * 60),
    "shared modules": lambda: _modules(60),
    "shared tuples as a key": lambda: beside(b"}" + doubled() + b"Ns"),
    "shared tuples in a set": lambda: beside(b"\x8f(" + doubled() + b"\x90"),
    "shared tuples in a frozenset": lambda: beside(b"(" + doubled() + b"\x91"),
    "shared tuples: constructor": lambda: beside(called("builtins.set", b"](" + doubled() + b"e")),
    "marks": lambda: beside(b"(" + b"N" * 100_000 + b"(t" * 100_000 + b"l"),
    "open marks": lambda: beside(b"(" * 100_000 + b"1" * 100_000 + b"N"),
    "deep tuples": lambda: beside(b")" + b"\x85" * 200_000),
    "deep objects": lambda: beside(kept(2, b"capp\nNet\n") + b")" + b"q\x010h\x02h\x01\x85R" * 30_000),
    "a list in itself": lambda: beside(b"]q\x01h\x01a"),
    "memo": lambda: beside(b"N" + b"\x94" * 600_000),
    "sets": lambda: beside(_many(b"\x8f", 600_000)),
    "dicts": lambda: beside(_many(b"}", 600_000)),
    "objects": lambda: beside(kept(1, b"capp\nNet\n") + _many(b"h\x01)R", 100_000)),
    "tensors": lambda: beside(
        kept(1, TENSOR)
        + kept(2, STORAGE)
        + kept(3, b"K\x04\x85")
        + kept(4, b"K\x01\x85")
        + _many(b"h\x01(h\x02K\x00h\x03h\x04\x89NtR", 100_000)
    ),
    "copies of a list": lambda: beside(
        kept(1, _many(b"N", 100_000)) + kept(2, b"cbuiltins\nlist\n") + _many(b"h\x02h\x01\x85R", 100_000)
    ),
    "copies of bytes": lambda: beside(
        kept(1, b"B\x00\x00\x10\x00", bytes(1 << 20))
        + kept(2, b"cbuiltins\nbytearray\n")
        + _many(b"h\x02h\x01\x85R", 50_000)
    ),
    "copies of arguments": lambda: beside(
        kept(1, b"(" + b"N" * 100_000 + b"t")
        + kept(2, b"capp\nNet\n")
        + _many(b"h\x02h\x01}" + text("a") + b"Ns\x92", 50_000)
    ),
    "copies of a state": lambda: beside(kept(1, _names(20_000)) + ORDERED + b")R" + b"h\x01b" * 100_000),
    "copies of a name": lambda: beside(kept(2, text("a" * 100_000) + text("b") + b"\x93") + _many(b"h\x02)R", 50_000)),
    "numbers that collide": lambda: beside(
        b"}(" + b"".join(number(n * (2**61 - 1)) + b"N" for n in range(100_000)) + b"u"
    ),
    "numbers that collide, in a set": lambda: beside(
        called("builtins.set", b"](" + b"".join(number(n * (2**61 - 1)) for n in range(100_000)) + b"e")
    ),
    "a large number as a key": lambda: beside(b"}" + number(1 << 800_000) + b"q\x01Ns" + b"h\x01Ns" * 10_000),
    "a large number in digits": lambda: beside(b"I" + b"9" * 200_000 + b"\n"),
    "a length beyond the file": lambda: beside(b"\x8e" + struct.pack("<Q", 1 << 40)),
    "a number beyond the file": lambda: beside(b"\x8b" + struct.pack("<i", (1 << 31) - 1)),
    "a frame beyond the file": lambda: beside(b"\x95" + struct.pack("<Q", 1 << 60) + b"\x8d"),
    "no end of a line": lambda: beside(b"S'" + b"a" * 600_000),
    "expanded": lambda: b"\x80\x02}" + text("w") + tensor(number(1 << 40) + b"\x85", b"K\x00\x85") + b"s.",
    "too many dimensions": lambda: beside(tensor(b"(" + b"K\x01" * 100_000 + b"t", b"(" + b"K\x00" * 100_000 + b"t")),
    "beyond its storage": lambda: beside(tensor(b"K\x64\x85", b"K\x01\x85")),
    "an offset beyond its storage": lambda: beside(tensor(b"K\x00\x85", b"K\x01\x85", number(1 << 62))),
    "a negative stride": lambda: beside(tensor(b"K\x02\x85", number(-1) + b"\x85")),
    "a negative size": lambda: beside(tensor(number(-1) + b"\x85", b"K\x01\x85")),
    "a size that is none": lambda: beside(tensor(text("4"), b"K\x01\x85")),
    "a type that is none": lambda: beside(
        called("torch._utils._rebuild_tensor_v3", STORAGE, b"K\x00", b"K\x04\x85", b"K\x01\x85", b"\x89", b"N", b"N")
    ),
    "a storage that is none": lambda: beside(TENSOR + b"(" + text("a") + b"K\x00K\x04\x85K\x01\x85\x89NtR"),
    "an array beyond its bytes": lambda: beside(_array(b"K\x02\x85", bytes(4))),
    "an array without end": lambda: beside(_array(number(1 << 40) + b"\x85", bytes(4))),
    "an array of many dimensions": lambda: beside(_array(b"(" + b"K\x01" * 60 + b"t", bytes(4))),
    "an array of a negative size": lambda: beside(_array(number(-1) + b"\x85", bytes(4))),
    "an array of shared lists": lambda: beside(_array(shared_lists(), bytes(4))),
    "an array whose type is shared lists": lambda: beside(_array(b"K\x01\x85", bytes(4), shared_lists())),
    "an array whose bytes are in an order of shared lists": lambda: beside(
        called("numpy.core.multiarray.scalar", _type(order=shared_lists()), b"C\x04" + bytes(4))
    ),
    "an array with nothing and without end": lambda: beside(_array(b"K\x00" + number(1 << 62) + b"\x86", b"")),
    "an array in an order of shared lists": lambda: beside(
        called("numpy.core.numeric._frombuffer", b"C\x04" + bytes(4), _type(), b"K\x01\x85", text("K"), shared_lists())
    ),
    "copies of an array": lambda: beside(
        kept(1, b"B\x00\x00\x10\x00", bytes(1 << 20))
        + kept(2, b"cnumpy.core.numeric\n_frombuffer\n")
        + kept(3, _type())
        + _many(b"h\x02(h\x01h\x03J\x00\x00\x04\x00\x85" + text("C") + b"tR", 10_000)
    ),
    "states of an array": lambda: beside(
        b"N\x94" * 1000 + _described() + b"(K\x01K\x01\x85" + _type() + b"\x89C\x04" + bytes(4) + b"tb"
    ),
    "a quantised tensor": lambda: beside(
        called("torch._utils._rebuild_qtensor", STORAGE, b"K\x00", b"K\x04\x85", b"K\x01\x85", b"N")
    ),
    "keys that are no text": lambda: b"\x80\x02}K\x01" + WEIGHT + b"s.",
    "a name without end": lambda: b"\x80\x02}" + text("a." * 50_000) + WEIGHT + b"s.",
    "a name for terminals": lambda: b"\x80\x02}" + text("w\x1b[2J") + WEIGHT + b"s.",
    "one dict at a million places": lambda: beside(
        kept(1, _names(20_000)) + kept(2, _names(20_000, b"h\x01")) + _names(20_000, b"h\x02")
    ),
    "places with long names": lambda: beside(
        (b"}" + text("a" * 900)) * 150 + b"](" + b"capp\nNet\n)R" * 5_000 + b"e" + b"s" * 150
    ),
    "a file in a file, often": lambda: (
        b"\x80\x02"
        + kept(1, b"ctorch.storage\n_load_from_bytes\n")
        + kept(2, b"B", struct.pack("<I", len(_legacy())), _legacy())
        + _many(b"h\x01h\x02\x85R", 20_000)
        + b"."
    ),
}


def _described() -> bytes:
    return called("numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", b"K\x00\x85", b"C\x01b")


def _type(code: bytes = b"X\x02\x00\x00\x00f4", order: bytes = b"X\x01\x00\x00\x00<") -> bytes:
    return called("numpy.dtype", code, b"\x89", b"\x88") + b"(K\x03" + order + b"NNNK\x00K\x00K\x00tb"


def _array(shape: bytes, data: bytes, code: bytes = b"X\x02\x00\x00\x00f4") -> bytes:
    """Return an array as NumPy gives it its state, of numbers of four bytes."""
    state = b"(K\x01" + shape + _type(code) + b"\x89C" + bytes([len(data)]) + data + b"tb"
    return _described() + state


def _legacy() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(4)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


# Files of other kinds


def _overlapping() -> bytes:
    """Return an archive whose directory names one large record a thousand times."""
    whole = archive(b"\x80\x02}" + text("w") + WEIGHT + b"s.", **{"data/big": bytes(1 << 20)})
    with zipfile.ZipFile(io.BytesIO(whole)) as made:
        start, big = made.start_dir, made.getinfo("archive/data/big")
    entries = whole[start : whole.rindex(b"PK\x05\x06")]
    for index in range(1000):
        name = f"archive/data/big{index}".encode()
        sizes = (1 << 20, 1 << 20, len(name))
        entries += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, *[0] * 4, 1, *sizes, *[0] * 5, big.header_offset)
        entries += name
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1004, 1004, len(entries), start, 0)
    return whole[:start] + entries + end


def _declared(size: int) -> bytes:
    """Return an archive whose pickle says that it has so many bytes."""
    whole = bytearray(archive(beside(b"N")))
    place = whole.index(b"PK\x01\x02")
    whole[place + 20 : place + 28] = struct.pack("<2I", size, size)
    return bytes(whole)


def _directory(count: int) -> bytes:
    """Return an archive of so many empty records."""
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0) + b"name"
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0, 0, len(entry) * count, 30, 0)
    return b"PK\x03\x04" + bytes(26) + entry * count + end


def _safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _tiny(count: int) -> bytes:
    return json.dumps({str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}).encode()


def _index(**places: object) -> bytes:
    return json.dumps({"weight_map": places}).encode()


def _alone(pickled: bytes) -> bytes:
    """Return a pickle as `pickle.dump` writes it, where a storage is a file of its own."""
    data = _legacy_storage()
    inside = b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(data)) + data + b"tR"
    return pickled.replace(STORAGE, inside)


def _legacy_storage() -> bytes:
    file = io.BytesIO()
    with without_warnings():  # about typed storages
        torch.save(torch.ones(4).storage(), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


CHECKPOINTS: dict[str, Callable[[], Files]] = {
    "compressed": lambda: {"f": archive(beside(b"N"), zipfile.ZIP_DEFLATED)},
    "a bomb": lambda: {"f": archive(beside(text("a" * 50_000_000)), zipfile.ZIP_DEFLATED)},
    "overlapping": lambda: {"f": _overlapping()},
    "a large declared size": lambda: {"f": _declared(0xFFFFFF00)},
    "many records": lambda: {"f": _directory(100_000)},
    "a long header": lambda: {"f": _safetensors(b"{" + b" " * 100, length=1 << 50)},
    "a deep header": lambda: {"f": _safetensors(b'{"a":' + b"[" * 100_000)},
    "many empty tensors": lambda: {"f": _safetensors(_tiny(100_000))},
    "tensors that overlap": lambda: {
        "f": _safetensors(
            json.dumps({str(n): {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in range(9)}).encode(),
            bytes(8),
        )
    },
    "a large shape": lambda: {
        "f": _safetensors(b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}', bytes(8))
    },
    "an index of itself": lambda: {"f": _index(a="f")},
    "an index of many indices": lambda: {
        "f": _index(a="1", b="2"),
        **{str(n): _index(a=str(n + 1), b=str(n + 2)) for n in range(1, 60)},
    },
    "an index of what is outside": lambda: {"f": _index(a="../outside")},
    "an index of its folder": lambda: {"f": _index(a="..")},
    "an index of lists": lambda: {"f": _index(a=[[]])},
    "a deep index": lambda: {"f": b'{"weight_map":' + b"[" * 200_000},
    "a wide index": lambda: {"f": b'{"weight_map":{"a":"b"},"metadata":[' + b"[]," * 3_000_000 + b"[]]}"},
    "an index with many names": lambda: {"f": _index(**{str(n): f"{n}.bin" for n in range(100_000)})},
    "a text without end": lambda: {"f": b"S'" + b"a" * 5_000_000},
    "zeros": lambda: {"f": bytes(600_000)},
    **{f"alone: {name}": (lambda made=made: {"f": _alone(made())}) for name, made in PICKLES.items()},
    **{f"packed: {name}": (lambda made=made: {"f": archive(made())}) for name, made in PICKLES.items()},
}


def _record(*lines: object, **header: object) -> bytes:
    first = {"format": "lightning_tricks.run_fingerprint", "detail": "step", "every_n_train_steps": 1, "rank": 0}
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return b"\n".join([json.dumps({**first, "world_size": 1, "version": 1, **header}).encode(), *rows, b""])


_ROWS = {"rows": base64.b64encode(bytes(8 * 4)).decode()}
RECORDS: dict[str, Callable[[], Files]] = {
    "deep": lambda: {"f": _record(b"[" * 200_000)},
    "a deep header": lambda: {"f": b"[" * 200_000 + b"\n"},
    "a deep value in the header": lambda: {
        "f": b'{"format":"lightning_tricks.run_fingerprint","version":1,"detail":' + b"[" * 900 + b"]" * 900 + b"}\n"
    },
    "columns that are lists": lambda: {"f": _record({"columns": [["loss", []]]}, _ROWS)},
    "columns of an unknown kind": lambda: {"f": _record({"columns": [["sound", "a"]]}, _ROWS)},
    "columns that are text": lambda: {"f": _record({"columns": "loss"}, _ROWS)},
    "rows that are a number": lambda: {"f": _record({"columns": [["loss"]]}, {"rows": 5})},
    "rows that do not go up": lambda: {"f": _record({"columns": [["loss"]]}, {"rows": "AAAA"})},
    "a wide line": lambda: {"f": _record(b'{"columns":[' + b"[]," * 5_000_000 + b"[]]}")},
    "many blocks": lambda: {"f": _record({"columns": [["loss"]]}, *[{"rows": ""}] * 100_000)},
    "a line without an end": lambda: {"f": _record() + b"a" * 10_000_000},
    "a large number": lambda: {"f": _record(b"9" * 600_000)},
}

RULES: dict[str, Callable[[], Files]] = {
    "deep": lambda: {"f": b"[" * 200_000},
    "deep blocks": lambda: {"f": b"- " * 200_000 + b"a"},
    "a list in itself": lambda: {"f": b"&a [*a]"},
    "aliases": lambda: {
        "f": b"- &a [x, x]\n" + b"".join(b"- &%d [*%d, *%d]\n" % (n, n - 1, n - 1) for n in range(1, 50))
    },
    "a number in base 60": lambda: {"f": b"- 1" + b":1" * 100_000},
    "repeats of a group": lambda: {"f": b"- {from: 're:(a+)+$', to: b}"},
    "many repeats": lambda: {"f": b"- {from: 're:.*.*.*.*.*x', to: b}"},
    "flags": lambda: {"f": b"- {from: 're:(?x)(a+) +$', to: b}"},
    "no expression": lambda: {"f": b"- {from: 're:(', to: b}"},
    "a group that is not there": lambda: {"f": b"- {from: 're:a', to: '\\9'}"},
    "many stars": lambda: {"f": b"- {from: 'a*a*a*a*a*a*a*b', to: c}"},
    "unknown words": lambda: {"f": b"- {from: a, to: b, colour: red}"},
    "a number": lambda: {"f": b"5"},
    "sizes that are text": lambda: {"f": b"- {from: a, to: [b, c], sizes: [x, y]}"},
    "too large": lambda: {"f": b"# " + b"a" * 3_000_000},
    "many words": lambda: {"f": b"- {from: a, to: [b, c]}\n" * 30_000},
    "objects": lambda: {"f": b"!!python/object/apply:os.system ['touch pwned']"},
    "other bytes": lambda: {"f": bytes(range(128, 256))},
    "deep groups": lambda: {"f": b"- {from: 're:" + b"(" * 480 + b")" * 480 + b"', to: b}"},
    "keys that are lists": lambda: {"f": b"? [a, b]\n: c\n"},
}


def honest() -> dict[str, bytes]:
    """Return files that are sound, of each kind, to be changed."""
    weights = {"layer.weight": torch.ones(3, 2), "layer.bias": torch.zeros(3), "count": torch.tensor(1)}
    value = {"state_dict": weights, "epoch": 3, "hyper_parameters": {"lr": 0.1, "sizes": [1, 2], "kind": torch.float16}}
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    files = {}
    for name, zipped, what in (("zip", True, value), ("legacy", False, value), ("module", True, module)):
        file = io.BytesIO()
        torch.save(what, file, _use_new_zipfile_serialization=zipped)
        files[name] = file.getvalue()
    for protocol in range(6):
        files[f"pickle {protocol}"] = pickle.dumps(value, protocol=protocol)
    from safetensors.torch import save

    files["safetensors"] = save(weights, {"a": "b"})
    files["index"] = _index(a="g", b="g")
    files["record"] = _record(
        {"columns": [["loss"], ["weights", "a", 1]]}, {"rows": base64.b64encode(bytes(40)).decode()}
    )
    files["rules"] = (
        b"- wrappers\n- {from: 're:a(.*)$', to: 'b\\1'}\n- {from: [a, b], to: c, dim: 0}\n"
        b"- - {from: 'x*', to: [y*, z*]}\n"
    )
    return files
