"""Read files that are changed or made at random: each is to be read or refused, soon and in little memory.

`python -m tests.checkpoint_remapping.fuzz --minutes 5` is what `make fuzz` runs; it ends with status 1 where a
file breaks the promise, and keeps that file.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import io
import os
import random
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.pretty import pretty_repr

from lightning_tricks.checkpoint_remapping import CheckpointError, read_checkpoint, read_rules
from lightning_tricks.run_fingerprint import FingerprintRecordError, read_ranks
from tests.checkpoint_remapping.hostile import CHECKPOINTS, RECORDS, RULES, Files, archive, honest, number, text

SECONDS = 10.0  # of the processor
MEMORY = 64 << 20, 16  # bytes, and as many more as the file's size times this

Case = tuple[str, str, Files]  # what reads it, what it is, and files of which `f` is read


def read(kind: str, path: Path) -> str:
    """Read a file; return what became of it. Other errors are those that the promise excludes."""
    try:
        if kind == "record":
            return f"{sum(len(record) for record in read_ranks(path))} rows"
        if kind == "rules":
            return f"{len(read_rules(path))} rules"
        checkpoint = read_checkpoint(path, mmap=path.stat().st_size % 2 == 0)
        pretty_repr(checkpoint.metadata, max_length=8, max_string=80, max_depth=2)  # as `ckpt show` does
        return f"{len(checkpoint.state_dict)} tensors"
    except (CheckpointError, FingerprintRecordError) as error:
        if len(str(error)) > 5000:
            raise AssertionError("an error of very many words") from error
        return str(error)
    except FileNotFoundError:
        return "a rank is missing"


def known() -> Iterator[Case]:
    """Yield one file of each class that is known."""
    for kind, files in (("checkpoint", CHECKPOINTS), ("record", RECORDS), ("rules", RULES)):
        for name, make in files.items():
            yield kind, name, make()


def random_cases(seed: int) -> Iterator[Case]:
    """Yield files without end."""
    chance = random.Random(seed)
    sound = honest()
    with zipfile.ZipFile(io.BytesIO(sound["zip"])) as packed:
        pickled = packed.read(next(name for name in packed.namelist() if name.endswith("data.pkl")))
    shard = {"g": sound["safetensors"]}
    while True:
        name = chance.choice([*sound, "pickle in an archive", "program", "program", "program"])
        if name == "program":
            made = program(chance)
            yield "checkpoint", name, {"f": made if chance.random() < 0.3 else archive(made)}
        elif name == "pickle in an archive":
            yield (
                "checkpoint",
                name,
                {"f": archive(changed(pickled, chance), **{"data/1": bytes(64), "data/2": bytes(64)})},
            )
        else:
            kind = name if name in ("record", "rules") else "checkpoint"
            yield kind, name, {"f": changed(sound[name], chance), **(shard if name == "index" else {})}


_NUMBERS = [
    *(struct.pack("<I", value) for value in (0xFFFFFFFF, 0x7FFFFFFF, 1 << 30)),
    *(struct.pack("<Q", value) for value in (1 << 62, 2**64 - 1)),
    *(b"\0", b"\xff", b"\xff\xff"),
]


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return a file with some bytes changed, left out, repeated or put elsewhere."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        place, length = chance.randrange(len(made) + 1), chance.choice((0, 1, 1, 2, 4, 8, 30))
        what = chance.randrange(5)
        if what == 0:
            made[place : place + length] = chance.randbytes(length)
        elif what == 1:
            value = chance.choice(_NUMBERS)
            made[place : place + len(value)] = value
        elif what == 2:
            other = chance.randrange(len(made) + 1)
            made[place:place] = made[other : other + length]
        elif what == 3:
            made[place:place] = made[place : place + length] * chance.choice((1, 10, 1000, 20_000))
        else:
            del made[place : place + length]
    return bytes(made)


_CALLED = """
    app.Net builtins.set builtins.frozenset builtins.list builtins.tuple builtins.dict builtins.bytearray builtins.bytes
    builtins.complex collections.OrderedDict collections.Counter copyreg.__newobj__ copyreg._reconstructor
    copyreg.__newobj_ex__ _codecs.encode torch.Size torch.device torch.serialization._get_layout torch.float32
    torch.FloatStorage torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter
    torch._utils._rebuild_sparse_tensor torch._utils._rebuild_meta_tensor_no_storage torch.jit._pickle.build_intlist
    torch._tensor._rebuild_from_type_v2 torch.jit._pickle.restore_type_tag torch.storage._load_from_bytes
    builtins.getattr
    """.split()  # noqa: SIM905  # a list of words
_STORED = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
_LEAVES = [
    b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"K\x01", b"K\x04", b"K\x04\x85", b"K\x01\x85", b"G?\xf0\0\0\0\0\0\0",
    text("a"), text("state_dict"), text("w"), text("_modules"), text("_parameters"), text("latin1"), b"C\x03abc",
    number(-1), number(1 << 40), number(2**61 - 1), number(1 << 5000), _STORED,
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORED + b"K\x00K\x04\x85K\x01\x85\x89NtR",
]  # fmt: skip


def program(chance: random.Random) -> bytes:
    """Return a pickle made of instructions of which each finds what it needs on the stack, parts of it many times."""
    made, height, memo = [b"\x80\x04"], 0, 0

    def value() -> bytes:
        if memo and chance.random() < 0.5:
            return b"j" + struct.pack("<I", chance.randrange(memo))
        if chance.random() < 0.2:
            module, _, name = chance.choice(_CALLED).rpartition(".")
            return f"c{module}\n{name}\n".encode()
        return chance.choice(_LEAVES)

    def several() -> bytes:
        return b"(" + b"".join(value() for _ in range(chance.choice((0, 1, 2, 2, 4, 6))))

    for _ in range(chance.randrange(3, 40)):
        times = chance.choice((1, 1, 1, 1, 2, 60, 60, 5_000, 60_000))
        call = b"c" + "\n".join(chance.choice(_CALLED).rpartition(".")[::2]).encode() + b"\n"
        grows = [value(), several() + b"t", several() + b"l", several() + b"\x91"]
        grows += [b"}(" + value() * 2 + b"u", call + several() + b"tR"]
        keeps = [b"\x85", b"2\x86", b"2\x86", b"\x94", value() + b"\x86", b"]" + value() + b"a0"]
        keeps += [b"2" + value() + b"b0"]
        fills = [value() + b"a", several() + b"e", value() * 2 + b"s", b"(" + value() * 4 + b"u"]
        fills += [several() + b"\x90", value() + b"b"]
        what = chance.random()
        if what < 0.4 or not height:
            made.append(chance.choice(grows) * times)
            height += times
        elif what < 0.7:
            chosen = chance.choice(keeps)
            made.append(chosen * times)
            memo += times * (chosen == b"\x94")
        else:
            made.append(chance.choice(fills) * times)
        if chance.random() < 0.4:
            made.append(b"\x94")
            memo += 1
    made.append(b"(" + text("w") + value() + text("x") + value() + b"d" if chance.random() < 0.5 else b"")
    return b"".join(made) + b"."


# Measuring


def broken_promise(kind: str, path: Path, size: int) -> str:
    """Read a file in this process; return in what the promise was broken, or nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, began = _memory("VmRSS"), time.process_time()
    try:
        read(kind, path)
    except BaseException as error:  # whatever it is, it should not be
        return f"{type(error).__name__}: {str(error)[:300]}"
    gc.collect()
    seconds, memory = time.process_time() - began, _memory("VmHWM") - before
    if seconds > SECONDS:
        return f"{seconds:.1f} s"
    if memory > MEMORY[0] + MEMORY[1] * size:
        return f"{memory >> 20} MiB for {size:,} bytes"
    return ""


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def run(cases: Iterable[Case]) -> list[tuple[Case, str]]:
    """Read files in a process of their own, anew after it ended; return those that broke the promise, and in what."""
    cases, found = list(cases), []
    with tempfile.TemporaryDirectory() as folder:
        while cases:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.close(reading)
                _work(cases, Path(folder), writing)
            os.close(writing)
            with os.fdopen(reading) as answers:
                lines = answers.read().split("\0")[:-1]
            _, status = os.waitpid(child, 0)
            found += [(case, line) for case, line in zip(cases, lines, strict=False) if line]
            if len(lines) < len(cases):
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                found.append((cases[len(lines)], signal.Signals(number).name if number else f"status {status}"))
            cases = cases[len(lines) + 1 :]
    return found


def _work(cases: list[Case], folder: Path, answers: int) -> None:
    gc.freeze()  # what is there need not be walked for each file
    faulthandler.disable()
    for kind, _, files in cases:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        signal.setitimer(signal.ITIMER_PROF, 3 * SECONDS)  # ends the process
        signal.alarm(600)
        os.write(answers, broken_promise(kind, folder / "f", sum(map(len, files.values()))).encode() + b"\0")
        for name in files:
            (folder / name).unlink()
    os._exit(0)


def main() -> None:
    """Read files until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end, counts, random_files = time.monotonic() + 60 * arguments.minutes, Counter[str](), random_cases(arguments.seed)
    batch = list(known())
    while True:
        found = run(batch)
        counts.update(kind for kind, _, _ in batch)
        for (kind, name, files), what in found:
            kept = Path(tempfile.mkdtemp(prefix="fuzz_"))
            for file, data in files.items():
                (kept / file).write_bytes(data)
            sys.stdout.write(f"{kind}, {name}: {what} ({kept})\n")
        if found:
            sys.exit(1)
        if time.monotonic() > end:
            break
        batch = [next(random_files) for _ in range(100)]
    sys.stdout.write(f"{counts.total():,} files, each read or refused as promised: {dict(counts)}\n")


if __name__ == "__main__":
    main()
