"""torchrun with one or two nodes: a node that dies is left out, and the other one goes on without it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.auto_resume import elastic_program
from tests.auto_resume.elastic_program import EPOCHS, SAMPLES
from tests.contract.processes import free_port

pytestmark = pytest.mark.thorough
_ROOT = Path(__file__).parents[2]


def _read(folder):
    """Return what processes read: number of ranks, epoch, step before it, samples; and of each the process."""
    found = []
    for file in folder.glob("read-*.txt"):
        for line in file.read_text().splitlines():
            ranks, epoch, step, *samples = map(int, line.split())
            found.append((file.stem.split("-")[2], ranks, epoch, step, samples))
    return found


def _descendants(process):
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(process), *(each for child in children for each in _descendants(child))]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a node in /proc")
def test_a_node_dies(tmp_path):
    """Agent and worker are killed at once; each sample of the epoch is read once by what counts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    port, agents = free_port(), []
    for is_host in (1, 0):
        waits = f"is_host={is_host},last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
        arguments = f"--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=x --rdzv-backend=c10d {waits}"
        arguments = arguments.replace(waits, f"--rdzv-endpoint=127.0.0.1:{port} --rdzv-conf={waits}")
        command = [sys.executable, "-m", "torch.distributed.run", *arguments.split()]
        command += [elastic_program.__file__, str(tmp_path)]
        with (tmp_path / f"agent{is_host}.log").open("w") as log:
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    until = time.monotonic() + 120
    while not any(epoch == 1 and step >= 8 for *_, epoch, step, _ in _read(tmp_path)):
        assert time.monotonic() < until, (tmp_path / "agent1.log").read_text()[-3000:]
        time.sleep(0.05)
    for process in _descendants(agents[1].pid):
        os.kill(process, signal.SIGKILL)
    agents[1].wait()
    assert agents[0].wait(timeout=180) == 0, (tmp_path / "agent1.log").read_text()[-3000:]
    resumed = re.findall(r"resumes at epoch (\d+), step (\d+)", (tmp_path / "agent1.log").read_text())
    ((epoch, step),) = {(int(epoch), int(step)) for epoch, step in resumed}
    read = _read(tmp_path)
    assert {ranks for _, ranks, *_ in read} == {1, 2}
    for number in range(EPOCHS):
        counts = [samples for _, ranks, at, before, samples in read if at == number and (ranks == 1 or before < step)]
        assert Counter(sample for samples in counts for sample in samples) == Counter(range(SAMPLES))
    assert epoch == 1
