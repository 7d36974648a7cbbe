"""Files that ask for much, and addresses that answer badly: each is refused in words, soon, and in little memory."""

import functools
import http.server
import itertools
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from lightning_tricks import load_weights, read_checkpoint
from lightning_tricks._shared.read_budget import Budget
from lightning_tricks.checkpoint_remapping import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
    UnsafeCheckpointError,
    read_rules,
    remap_keys,
)
from lightning_tricks.checkpoint_remapping.core.files import reading
from lightning_tricks.run_fingerprint import FingerprintRecordError, read_ranks
from tests.checkpoint_remapping import fuzz, hostile
from tests.checkpoint_remapping.hostile import CHECKPOINTS, PICKLES, RULES
from tests.small import cases, same

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
slow = {"packed: numbers that collide", "packed: numbers that collide, in a set"}  # as long as a reader may take


@needs_proc
@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_each_known_class_keeps_the_promise(each):
    """`make fuzz` reads all of them first."""
    known = [case for case in fuzz.known() if not case[1].startswith("alone") and case[1] not in slow]
    assert [(kind, name, what) for (kind, name, _), what in fuzz.run(known[::each])] == []


@needs_proc
def test_random_files_keep_the_promise():
    """A fixed sample of what `make fuzz` reads for minutes."""
    sample = itertools.islice(fuzz.random_cases(19), 150)
    assert [(kind, name, what) for (kind, name, _), what in fuzz.run(sample)] == []


@needs_proc
@pytest.mark.parametrize("what", ["crash", "memory", "other error"])
def test_the_fuzzing_itself_finds_what_breaks_the_promise(what, monkeypatch):
    def bad(kind, path):
        if what == "crash":
            os.abort()
        if what == "other error":
            raise KeyError("a")
        bytearray(100 << 20)[::4096] = b"a" * (100 << 8)

    monkeypatch.setattr(fuzz, "read", bad)
    (case, found), _ = fuzz.run([("checkpoint", "one", {"f": b""}), ("checkpoint", "two", {"f": b""})])
    assert case[1] == "one"
    assert {"crash": "SIGABRT", "memory": "MiB for 0 bytes", "other error": "KeyError"}[what] in found


@cases(
    "name, words",
    ("packed: shared modules", "takes more than [0-9,]+ bytes of memory, which is far more than its size explains"),
    ("packed: deep tuples", "lists or dicts that are nested more than 200 deep"),
    ("packed: a list in itself", "nested more than 200 deep, or in themselves"),
    ("packed: shared tuples as a key", "a dict key of more than 64 parts"),
    ("packed: expanded", "takes more than"),
    ("packed: a name without end", "a tensor whose name no layer has"),
    ("packed: a name for terminals", "a tensor whose name no layer has"),
    ("packed: an array beyond its bytes", "a tensor whose data, shape or strides are invalid"),
    ("packed: an array without end", "a tensor whose data, shape or strides are invalid"),
    ("compressed", "compressed records, which torch does not write"),
    ("an index of itself", "a text file"),
    ("an index of its folder", "missing in its folder"),
)
def test_the_message_names_the_problem(name, words):
    for file, data in CHECKPOINTS[name]().items():
        Path(file).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"^f is .*{words}"):
        read_checkpoint("f")


@pytest.mark.parametrize("name", ["numbers that collide", "numbers that collide, in a set"])
def test_time_is_charged_where_nothing_else_tells(name, monkeypatch):
    """Whole numbers are their own hashes: a file can choose keys that are all found one after the other."""
    monkeypatch.setattr(reading, "Budget", functools.partial(Budget, seconds=0.3))
    Path("f").write_bytes(hostile.archive(PICKLES[name]()))
    with pytest.raises(NotACheckpointError, match=r"takes more than 0.3 s of processor time"):
        read_checkpoint("f")


def test_nesting_is_counted_through_what_is_shared():
    """A list that was walked already is as deep where it stands inside others."""
    inner = functools.reduce(lambda value, _: [value], range(120), [1])
    outer = functools.reduce(lambda value, _: [value], range(120), inner)
    torch.save({"w": torch.ones(1), "inner": inner}, "f")
    assert len(read_checkpoint("f").state_dict) == 1
    torch.save({"w": torch.ones(1), "inner": inner, "outer": outer}, "f")
    with pytest.raises(NotACheckpointError, match="nested more than 200 deep"):
        read_checkpoint("f")


def test_the_header_of_a_safetensors_is_charged():
    """50,000 empty tensors take more memory than a file of 3 MB explains, whose header is not free either."""
    Path("f").write_bytes(hostile._safetensors(hostile._tiny(50_000)))
    with pytest.raises(NotACheckpointError, match="far more than its size explains"):
        read_checkpoint("f")


def test_what_is_shared_honestly_is_read():
    layer = torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    repeated = torch.ones(3, 1).expand(3, 5)
    torch.save({"model": module, "mask": {"mask": repeated}, "lists": [[1]] * 3}, "f")
    found = read_checkpoint("f", key="model")
    assert list(found.state_dict) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(read_checkpoint("f", key="mask").state_dict["mask"], repeated)


def test_many_weights_and_long_lists_are_read():
    weights = {f"layers.{index}.weight": torch.zeros(1) for index in range(5_000)}
    torch.save(
        {"state_dict": weights, "order": list(range(200_000)), "losses": {7919 * n: n / 7 for n in range(20_000)}}, "f"
    )
    found = read_checkpoint("f")
    assert len(found.state_dict) == 5_000
    assert len(found.metadata["order"]) == 200_000


# What is no file


@pytest.mark.skipif(os.name != "posix", reason="there are no pipes with names")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory"])
def test_what_is_no_file_is_refused_at_once(kind):
    path = Path("f")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(NotACheckpointError, match=f"f is a {kind}"):
        read_checkpoint("f")
    with pytest.raises(CheckpointError, match=f"f is a {kind}, not a file"):
        read_rules("f")
    with pytest.raises(FingerprintRecordError, match=f"f is a {kind}, not a file"):
        read_ranks("f")
    Path("index.json").write_text('{"weight_map": {"a": "f"}}')
    with pytest.raises(NotACheckpointError, match=r"shard f is missing"):
        read_checkpoint("index.json")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read():
    Path("f").write_bytes(b"")
    Path("f").chmod(0)
    with pytest.raises(CheckpointError, match="f cannot be read: Permission denied"):
        read_checkpoint("f")


# Rules


def test_rules_of_a_file_are_trusted_less_than_those_in_code():
    Path("rules.yaml").write_bytes(RULES["repeats of a group"]()["f"])
    with pytest.raises(CheckpointError, match=r"rules.yaml is not a file of rules: '\(a\+\)\+\$' repeats a group"):
        load_weights(torch.nn.Linear(1, 1), {"weight": torch.ones(1, 1)}, rules="rules.yaml")
    assert list(remap_keys({"aa": torch.ones(1)}, [("re:(a+)+$", "b")])) == ["b"]
    for name in ("many repeats", "flags", "no expression", "many stars", "unknown words", "objects"):
        Path("rules.yaml").write_bytes(RULES[name]()["f"])
        with pytest.raises(CheckpointError, match=r"rules.yaml is not a file of rules"):
            read_rules("rules.yaml")
    Path("rules.yaml").write_text(
        "- {from: 're:^(?:net|model)\\.(.*)\\.(\\d+)\\.(\\w+)$', to: 'x.\\1'}\n- {from: 'a*b*c*', to: 'd*'}"
    )
    assert len(read_rules("rules.yaml")) == 2


def test_rules_cannot_make_names_without_end():
    doubling = [("re:^(.*)$", r"\1\1")] * 60
    with pytest.raises(CheckpointError, match=r"makes a name of 16,384 characters"):
        remap_keys({"aaaa": torch.ones(1)}, doubling)


# Addresses


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as badly as the path says."""

    protocol_version = "HTTP/1.1"

    def head(self, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def do_GET(self):
        self.close_connection = True
        data = self.server.files.get(self.path)
        if data is None:
            getattr(self, f"do_{self.path.strip('/')}")()
        else:
            self.head(Content_Length=len(data))
            self.wfile.write(data)

    def do_missing(self):
        self.head(404)

    def do_broken(self):
        self.head(500)

    def do_loop(self):
        self.head(302, Location="/loop")

    def do_file(self):
        self.head(302, Location="file:///etc/passwd")

    def do_nonsense(self):
        self.wfile.write(b"hello\r\n\r\n")

    def do_nothing(self):
        pass

    def do_silent(self):
        self.server.over.wait(20)

    def do_short(self):
        self.head(Content_Length=1000)
        self.wfile.write(b"PK")

    def do_chunks(self):
        self.head(Transfer_Encoding="chunked")
        self.wfile.write(b"zz\r\n")

    def do_length(self):
        self.head(Content_Length="many")

    def do_headers(self):
        self.head(**{f"X{n}": "a" for n in range(200)})

    def do_reset(self):
        self.head(Content_Length=1000)
        self.wfile.write(b"PK")
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()

    def log_message(self, *arguments):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass


@pytest.fixture
def files():
    return {}


@pytest.fixture
def root(files):
    server = Server(("127.0.0.1", 0), Answers)
    server.over, server.files = threading.Event(), files
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_read_as_safely_as_files(files, root):
    expected = torch.nn.Linear(2, 3).state_dict()
    torch.save(expected, "w.pt")
    torch.save({"state_dict": expected, "x": _Call()}, "evil.pt")
    files |= {f"/{name}": Path(name).read_bytes() for name in ("w.pt", "evil.pt")} | {"/": b"<html>"}
    for address in (f"{root}/w.pt", f"file://{Path('w.pt').absolute()}"):
        assert same(read_checkpoint(address).state_dict, dict(expected))
    with pytest.raises(UnsafeCheckpointError):
        read_checkpoint(f"{root}/evil.pt")
    with pytest.raises(NotACheckpointError, match="an HTML page"):
        read_checkpoint(f"{root}/")
    assert not Path("pwned").exists()


class _Call:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@cases(
    "path, error, words",
    ("missing", MissingCheckpointError, "cannot be downloaded: HTTP Error 404"),
    ("broken", MissingCheckpointError, "cannot be downloaded: HTTP Error 500"),
    ("loop", MissingCheckpointError, "cannot be downloaded: .*infinite loop"),
    ("file", MissingCheckpointError, "cannot be downloaded: .*not allowed"),
    ("nonsense", MissingCheckpointError, "cannot be downloaded: hello"),
    ("nothing", MissingCheckpointError, "cannot be downloaded: Remote end closed"),
    ("silent", MissingCheckpointError, "cannot be downloaded: .*timed out"),
    ("short", CheckpointError, "is .*truncated"),
    ("chunks", MissingCheckpointError, "cannot be downloaded: "),
    ("length", NotACheckpointError, "an empty file. Download it again"),
    ("headers", MissingCheckpointError, "cannot be downloaded: got more than 100 headers"),
    ("reset", CheckpointError, "cannot be downloaded|truncated"),
)
def test_bad_answers(root, path, error, words, monkeypatch):
    if path == "silent":
        monkeypatch.setattr(reading, "TIMEOUT", 0.2)
    with pytest.raises(error, match=f"{root}/{path} .*({words})"):
        read_checkpoint(f"{root}/{path}")


@cases(
    "address",
    "http://127.0.0.1:1/f",
    "http://nowhere.invalid/f",
    "http://127.0.0.1:port/f",
    "http://a b/f",
    "nonsense://a/f",
)
def test_bad_addresses(address, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", _no_names(socket.getaddrinfo))
    with pytest.raises(MissingCheckpointError, match="cannot be downloaded: "):
        read_checkpoint(address)


def _no_names(resolve):
    def resolve_numbers(host, *arguments, **keywords):
        if host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **keywords)

    return resolve_numbers


def test_another_protocol_than_the_address_says(root):
    with pytest.raises(MissingCheckpointError, match=r"cannot be downloaded: .*SSL"):
        read_checkpoint(f"{root.replace('http:', 'https:')}/nothing")
