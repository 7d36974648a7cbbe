"""Other processes that select GPUs, or find those of this one selected."""

import os
import subprocess
import sys
import textwrap

from tests.devices.fake_nvml import FakeGpu, FakeNvml

HOLD = """
    from lightning_tricks.devices import select_gpus
    from tests.devices.fake_nvml import FakeGpu, FakeNvml
    print(select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu()])).devices[0], flush=True)
    input()
"""


def nvml(count):
    return FakeNvml([FakeGpu() for _ in range(count)])


def python(code, *arguments, **options):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def in_fork(function):
    """Return what a forked child, which ends without cleaning up, exits with."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
