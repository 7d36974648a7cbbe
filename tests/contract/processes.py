"""What tests need that start processes of their own: a free port, output in a file, an exit status."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def append_output_to(file: Path) -> None:
    """Let what this process and its children print from now on be appended to a file."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def run_and_exit(work: Callable[[], object]) -> NoReturn:
    """End this fork as the interpreter ends a script that consists of `work()`, and without what pytest does then."""
    status = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        work()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
