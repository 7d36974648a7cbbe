"""Runs at addresses of Google's and Azure's storage, on emulators of this machine: killed, resumed elsewhere, damaged.

`python -m tests.object_stores.emulators` needs gcsfs with `gcp-storage-emulator` (a package of Python), and adlfs with
`azurite-blob` (the package azurite of npm) on the PATH; it ends with status 1 if one is missing, or a run differs.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import fsspec

from tests.auto_resume.killing import STOPPED, resumed_at, run
from tests.object_stores.machines import assert_as_undisturbed, assert_ends, at, kill_all, on, output

_AZURITES_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public


@contextmanager
def emulator(name: str, port: int, folder: str) -> Iterator[dict[str, str]]:
    """Start the emulator of "gs" or "az", and yield the environment that leads to it."""
    url = f"http://127.0.0.1:{port}"
    if name == "gs":
        command = ["gcp-storage-emulator", "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
        environment = {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    else:
        command = ["azurite-blob", f"--blobPort={port}", "--location", folder, "--silent", "--skipApiVersionCheck"]
        command.append("--disableTelemetry")
        account = f"AccountName=devstoreaccount1;AccountKey={_AZURITES_KEY};BlobEndpoint={url}/devstoreaccount1;"
        environment = {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if process.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
                time.sleep(0.1)
            yield environment
        finally:
            process.kill()


def stopped(address: str, folder: Path) -> str:
    """Stopped by a signal, resumed on an empty machine, and extended there."""
    first, second = (folder / name for name in ("first", "second"))
    options = on(first, address, loggers=["csv"], kill=["on_train_batch_start", 9, "SIGTERM", 0])
    assert run(first, options) == STOPPED, output(first)[-3000:]
    more = on(second, address, loggers=["csv"])
    assert_ends(second, more)
    assert_as_undisturbed([first, second], folder / "whole", more)
    return f"resumed at step {max(resumed_at(second))}"


def killed(address: str, folder: Path) -> str:
    first, second = (folder / name for name in ("first", "second"))
    run(first, on(first, address, more=[at("on_train_batch_start", 9, kill_all)]))
    more = on(second, address)
    assert_ends(second, more)
    assert_as_undisturbed([first, second], folder / "whole", more)
    return f"resumed at {resumed_at(second) or 'the start'}"


def damaged(address: str, folder: Path) -> str:
    """The newest checkpoint is truncated in the store."""
    first, second = (folder / name for name in ("first", "second"))
    run(first, on(first, address, kill=["on_train_batch_start", 9, "SIGTERM", 0]))
    files, root = fsspec.url_to_fs(address, use_listings_cache=False)
    newest = max(name for name in files.find(root) if name.endswith("meta.pt"))
    files.pipe_file(newest, files.cat_file(newest)[:-100])
    more = on(second, address)
    assert_ends(second, more)
    assert "has other bytes" in output(second)
    assert_as_undisturbed([first, second], folder / "whole", more)
    return f"resumed at step {max(resumed_at(second))}"


def main() -> int:
    """Run all cases, and print what each of them found."""
    problems = 0
    cases: tuple[Callable[[str, Path], str], ...] = (stopped, killed, damaged)
    for number, name in enumerate(sys.argv[1:] or ("gs", "az")):
        with (
            tempfile.TemporaryDirectory() as place,
            emulator(name, 15070 + number, place) as environment,
            patch.dict(os.environ, environment),
        ):
            fsspec.url_to_fs(f"{name}://bucket")[0].mkdir("bucket")
            for case in cases:
                folder = Path(tempfile.mkdtemp())
                try:
                    found = case(f"{name}://bucket/{case.__name__}", folder)
                except Exception as error:  # of a case, which the others do not share
                    problems, found = problems + 1, f"FAILED: {error}"
                sys.stdout.write(f"{name} {case.__name__}: {found}\n")
                sys.stdout.flush()
                shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
