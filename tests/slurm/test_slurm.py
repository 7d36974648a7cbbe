"""Jobs of a real Slurm that are signalled, requeued and cut off end as the undisturbed ones."""

import re
import shlex
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.slurm.cluster import cluster, why_missing
from tests.small import same

ROOT = Path(__file__).parents[2]
PROGRAM = f"{shlex.quote(sys.executable)} {ROOT / 'tests/slurm/program.py'}"
TWO = ("--ntasks-per-node=2",)


@pytest.fixture(scope="module", params=["RequeueExit=75"])
def slurm(request, tmp_path_factory):
    """A cluster whose administrator has set a line."""
    root = ROOT / "build/slurm"
    if why := why_missing(root):
        pytest.skip(why)
    with cluster(root, tmp_path_factory.mktemp("slurm") / "run", request.param) as started:
        yield started


class Job:
    """A job of the program in a folder of its own."""

    def __init__(self, slurm, folder, lines, *options):
        folder.mkdir()
        self.slurm, self.folder = slurm, folder
        script = folder / "job.sh"
        environment = f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
        lines = lines.replace("{program}", f"{PROGRAM} {folder}").replace("{folder}", str(folder))
        head, options_of_script = "#!/bin/bash\n", "".join(re.findall(r"^#SBATCH .*\n", lines, re.MULTILINE))
        script.write_text(head + options_of_script + environment + lines)
        output = ("--open-mode=append", f"--output={folder}/output.txt")
        self.number = slurm.submit(script, *output, *options)

    def at_step(self, step, task="."):
        """Wait until a step is done, of a task of an array."""
        file, until = self.folder / task / "steps", time.monotonic() + 90
        while not file.exists() or str(step) not in file.read_text().split():
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def signal_in_the_middle(self, *options):
        """Send it SIGUSR1 in its second epoch."""
        self.at_step(7)
        self.slurm.command("scancel", *options, "--signal=USR1", self.number)

    def ends(self, *, restarts=0, tasks=2):
        """Wait until the job is done, and return the weights and random state of each rank."""
        try:
            states = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
            job = self.slurm.wait(self.number, *states, restarts=restarts, seconds=240)
        except TimeoutError as error:
            raise AssertionError(self.output) from error
        assert job["JobState"] == "COMPLETED", self.output
        assert int(job["Restarts"]) == restarts
        return [torch.load(self.folder / f"end{rank}.pt") for rank in range(tasks)]

    @property
    def output(self):
        return (self.folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def whole(slurm, tmp_path_factory):
    """What an undisturbed job of so many tasks ends with."""

    @cache
    def ends(tasks):
        folder = tmp_path_factory.mktemp("whole") / "job"
        return Job(slurm, folder, "srun {program}", f"--ntasks-per-node={tasks}").ends(tasks=tasks)

    return ends


def test_a_signal_to_the_steps_requeues_the_job(slurm, whole, tmp_path):
    """As `#SBATCH --signal=USR1@90` sends it: the run exits with 75, at which the administrator's line requeues it."""
    job = Job(slurm, tmp_path / "job", "srun {program}", *TWO)
    job.signal_in_the_middle()
    assert same(job.ends(restarts=1), whole(2))
    assert "stopped by SIGUSR1" in job.output
    assert "the run resumes at" in job.output


@pytest.mark.thorough
def test_lightning_requeues_beside_it(slurm, whole, tmp_path):
    """Both write a checkpoint; AutoResume's is resumed."""
    job = Job(slurm, tmp_path / "job", "srun {program} --lightning-requeues", *TWO)
    job.signal_in_the_middle()
    assert same(job.ends(restarts=1), whole(2))


@pytest.mark.thorough
def test_requeued_from_outside(slurm, whole, tmp_path):
    """Slurm sends SIGTERM, and waits for what is saved then."""
    job = Job(slurm, tmp_path / "job", "srun {program}", *TWO)
    job.at_step(7)
    slurm.command("scontrol", "requeue", job.number)
    assert same(job.ends(restarts=1), whole(2))


@pytest.mark.thorough
def test_without_srun_nobody_gets_the_signal(slurm, whole, tmp_path):
    """AutoResume says so where the program is begun by a job script alone."""
    job = Job(slurm, tmp_path / "job", "{program}")
    job.signal_in_the_middle()
    assert same(job.ends(tasks=1), whole(1))
    assert "stopped by" not in job.output
    assert "without srun" in job.output


@pytest.mark.thorough
def test_the_program_in_the_place_of_the_script_gets_it(slurm, whole, tmp_path):
    """With `exec`, and a signal to the batch shell."""
    job = Job(slurm, tmp_path / "job", "exec {program}")
    job.signal_in_the_middle("--batch")
    assert same(job.ends(restarts=1, tasks=1), whole(1))
    assert "without srun" not in job.output


@pytest.mark.thorough
def test_an_array(slurm, whole, tmp_path):
    """Each task of an array is a run of its own, in a directory of its own."""
    folder = tmp_path / "job"
    lines = "mkdir -p {folder}/$SLURM_ARRAY_TASK_ID; srun {program}/$SLURM_ARRAY_TASK_ID"
    job = Job(slurm, folder, lines, "--array=0-1")
    first = f"{job.number}_0"
    job.at_step(7, task="0")
    slurm.command("scancel", "--signal=USR1", first)
    assert slurm.wait(first, "COMPLETED", restarts=1)
    assert slurm.wait(f"{job.number}_1", "COMPLETED")
    for task in "01":
        assert same([torch.load(folder / task / "end0.pt")], whole(1))


@pytest.mark.thorough
def test_the_signal_before_a_time_limit(slurm, whole, tmp_path):
    """It comes up to a minute early."""
    lines = "[ $SLURM_RESTART_COUNT ] || export SECONDS_A_STEP=8\nsrun {program}"
    job = Job(slurm, tmp_path / "job", lines, *TWO, "--time=2", "--signal=USR1@30")
    assert same(job.ends(restarts=1), whole(2))
    assert "stopped by SIGUSR1" in job.output


@pytest.mark.thorough
def test_a_time_limit(slurm, whole, tmp_path):
    """Slurm sends SIGTERM, and requeues nothing; the job that is submitted next goes on."""
    folder = tmp_path / "job"
    job = Job(slurm, folder, "[ -d {folder}/runs ] || export SECONDS_A_STEP=8\nsrun {program}", *TWO, "--time=1")
    slurm.wait(job.number, "TIMEOUT", seconds=180)
    assert "stopped by SIGTERM" in job.output
    again = slurm.submit(folder / "job.sh", "--open-mode=append", f"--output={folder}/output.txt", *TWO)
    slurm.wait(again, "COMPLETED")
    assert same([torch.load(folder / f"end{rank}.pt") for rank in range(2)], whole(2))


@pytest.mark.thorough
def test_a_signal_while_python_starts(slurm, whole, tmp_path):
    """What the shell ignores does not end a process that has no handler yet."""
    job = Job(slurm, tmp_path / "job", "srun bash -c \"trap '' USR1; touch {folder}/begun; exec {program}\"", *TWO)
    until = time.monotonic() + 60
    while not (tmp_path / "job/begun").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    slurm.command("scancel", "--signal=USR1", job.number)
    assert same(job.ends(), whole(2))


@pytest.mark.thorough
@pytest.mark.parametrize("slurm", ["", "RequeueExit=75"], indirect=True)
def test_the_script_of_the_documentation(slurm, tmp_path):
    """Whether or not the administrator lets Slurm requeue by itself."""
    lines = (ROOT / "examples/job.slurm").read_text().replace("python train.py", "{program}")
    whole = Job(slurm, tmp_path / "whole", lines)
    whole_ends = whole.ends()
    job = Job(slurm, tmp_path / "job", lines)
    job.signal_in_the_middle()
    assert same(job.ends(restarts=1), whole_ends)
