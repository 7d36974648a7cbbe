"""Ranks that Lightning launches use the selection of the first; those of others use what their command line selects."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from lightning_tricks.devices import NoGpuAvailableError, RankError, select_gpus
from lightning_tricks.devices.core.gpu_locks import LOCKS, is_locked, lock_folder, lock_path
from lightning_tricks.devices.core.result import CHOICE_VARIABLE as VARIABLE
from lightning_tricks.devices.core.result import state
from tests.devices.boards import LOST
from tests.devices.fake_nvml import FakeGpu, FakeNvml
from tests.devices.jobs import HOLD, in_fork, nvml, python
from tests.small import cases

POSIX = pytest.mark.skipif(os.name != "posix", reason="forks, or becomes another program")
UUIDS = [f"GPU-0000000{index}-0000-4000-8000-000000000000" for index in range(4)]


def new_process(monkeypatch, **environment):
    """Let this process be another one, with this environment."""
    state.forget()
    LOCKS.forget()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def told(*choice, leader=None):
    """Return what a process, by default the parent of this one, tells those that it starts."""
    return f"{leader or os.getppid()}:{','.join(choice)}"


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=280
    )


def written(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


# Lightning's launcher

LIGHTNING = """
    import json, os, subprocess, sys
    from pathlib import Path
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_tricks.devices import select_gpus
    from tests.devices.fake_nvml import FakeGpu, FakeNvml

    if __name__ == "__main__":
        out, rank = Path(sys.argv[1]), os.environ.get("LOCAL_RANK", "0")
        load = {"utilization": 50} if rank == "1" else {}  # the leader's model runs already
        nvml = FakeNvml([FakeGpu(memory_used="1GiB"), FakeGpu(**load), FakeGpu(memory_used="2GiB"), FakeGpu(**load)])
        first = select_gpus(2, nvml=nvml)
        trainer = Trainer(
            accelerator="cpu", devices=len(first.devices), strategy="ddp", max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=out,
        )
        trainer.fit(BoringModel())
        again = select_gpus(2, nvml=nvml)
        job = "from lightning_tricks.devices import select_gpus; from tests.devices.fake_nvml import *; "
        job += "print(select_gpus(nvml=FakeNvml([FakeGpu() for _ in range(4)])).devices[0])"
        job = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True).stdout if rank == "0" else ""
        text = json.dumps({"rank": rank, "first": first.devices, "again": again.devices, "job": job.strip()})
        (out / f"{rank}.json").write_text(text)
"""


@pytest.mark.oldest
@pytest.mark.trap("devices: two jobs in one second get two GPUs under DDP (pytorch#131788)")
def test_ranks_that_lightning_launches_use_the_selection_of_the_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LIGHTNING))
    result = run(script, tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert result.returncode == 0, result.stderr
    # the job that rank 0 started afterwards is no rank, and the two GPUs are locked
    assert written(tmp_path) == [
        {"rank": "0", "first": [1, 3], "again": [1, 3], "job": "0"},
        {"rank": "1", "first": [1, 3], "again": [1, 3], "job": ""},
    ]


def test_a_rank_finds_the_selected_gpus_by_uuid_whatever_limits_say(monkeypatch):
    new_process(monkeypatch, LOCAL_RANK="1", **{VARIABLE: told(UUIDS[0], UUIDS[2])}, CUDA_VISIBLE_DEVICES="2,1,0")
    busy = FakeNvml([FakeGpu(memory_used="80GiB", utilization=100) for _ in range(3)])
    selection = select_gpus(2, nvml=busy)
    assert selection.devices == [0, 2]
    assert [gpu.index for gpu in selection.gpus] == [2, 0]
    assert os.environ[VARIABLE] == told(UUIDS[2], UUIDS[0], leader=os.getpid())


def test_a_rank_of_the_cpu_uses_the_cpu(monkeypatch):
    new_process(monkeypatch, LOCAL_RANK="1", **{VARIABLE: told("cpu")})
    assert select_gpus(2, nvml=nvml(4)).accelerator == "cpu"


def test_a_rank_names_beside_a_lost_gpu_what_the_first_rank_named(monkeypatch):
    fake = FakeNvml([FakeGpu(fails=LOST), FakeGpu(), FakeGpu()])
    leader = select_gpus(2, nvml=fake)
    new_process(monkeypatch, LOCAL_RANK="1")  # it inherits the rest
    rank = select_gpus(2, nvml=fake)
    assert (leader.devices, rank.devices) == ([0, 1], [0, 1])
    assert rank.cuda_visible_devices == leader.cuda_visible_devices == os.environ["CUDA_VISIBLE_DEVICES"]


def test_another_number_or_a_hidden_gpu_is_an_error_of_the_rank(monkeypatch):
    new_process(monkeypatch, LOCAL_RANK="1", **{VARIABLE: told(UUIDS[3])})
    with pytest.raises(RankError, match=f"use 1 selected GPUs .{UUIDS[3]}., and n=2"):
        select_gpus(2, nvml=nvml(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RankError, match=rf"selected {UUIDS[3]}, which this rank does not see. This .* GPU 2, 3 of"):
        select_gpus(1, nvml=nvml(4))
    with pytest.raises(RankError, match="NVML does not start"):
        select_gpus(1, nvml=FakeNvml(init_error="DRIVER_NOT_LOADED"))


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "0"}])
def test_a_job_that_a_script_starts_selects_for_itself(environment, monkeypatch):
    new_process(monkeypatch, **{VARIABLE: told(UUIDS[3])}, **environment)
    assert select_gpus(nvml=nvml(4)).devices == [0]
    assert os.environ[VARIABLE] == told(UUIDS[0], leader=os.getpid())


def test_the_first_rank_keeps_its_selection_when_it_has_launched_others(monkeypatch):
    gpus = [FakeGpu(), FakeGpu()]
    with select_gpus(nvml=FakeNvml(gpus)) as selection:
        monkeypatch.setenv("LOCAL_RANK", "0")  # Lightning launches
        gpus[0].utilization = 50
        assert select_gpus(nvml=FakeNvml(gpus)).devices == selection.devices == [0]
        with pytest.raises(RankError, match="n=2"):
            select_gpus(2, nvml=FakeNvml(gpus))
    select_gpus(nvml=FakeNvml(gpus)).release()
    assert state.locks == {}
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [0]  # though it was released
    assert list(state.locks) == UUIDS[:1]


def test_a_released_gpu_that_another_job_took_is_an_error_of_the_first_rank(monkeypatch):
    selection = select_gpus(nvml=nvml(4))
    monkeypatch.setenv("LOCAL_RANK", "0")
    selection.release()
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", VARIABLE)}
    job = python(HOLD, env=environment)
    assert job.stdout.readline() == "0\n"
    with pytest.raises(NoGpuAvailableError, match="which the ranks of this run use, is selected by"):
        select_gpus(nvml=nvml(4))
    job.communicate("\n", timeout=300)


# torchrun, srun and mpirun

ON_FAKES = """
    import sys
    from lightning_tricks.cli import main
    from tests.devices.fake_nvml import FakeGpu, FakeNvml
    with FakeNvml([FakeGpu(FIRST), FakeGpu(), FakeGpu(), FakeGpu()]):
        sys.exit(main(["gpus", *sys.argv[1:]]))
"""
RANK = """
    import json, os, sys, time
    from pathlib import Path
    from lightning_tricks.devices import RankError, select_gpus

    out, rank, start = Path(sys.argv[1]), os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    try:
        said = repr(select_gpus(2, fallback="cpu"))
    except RankError as error:
        said = str(error)
    staged = out / f"{start}-{rank}"
    staged.write_text(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], said]))
    staged.rename(staged.with_suffix(".json"))
    deadline = time.monotonic() + 60
    while not (out / f"go{start}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    sys.exit(start == "0")
"""


@pytest.fixture
def on_fakes():
    """Starts `lightning-tricks gpus` on a machine with four GPUs, of which the first is not free."""

    def start(*arguments, first="utilization=99"):
        command = [sys.executable, "-c", textwrap.dedent(ON_FAKES).replace("FIRST", first), *map(str, arguments)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return jobs[-1]

    jobs = []
    yield start
    for job in jobs:
        job.kill()
        job.communicate()


def locked():
    """Return which of the four GPUs are locked."""
    return [index for index, uuid in enumerate(UUIDS) if is_locked(lock_path(lock_folder(), uuid))]


@POSIX
@pytest.mark.oldest
def test_ranks_of_torchrun_use_what_its_command_line_selects_and_keeps_through_restarts(on_fakes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RANK))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    job = on_fakes("--select", 2, "--", *torchrun, "--max-restarts", 1, script, tmp_path)
    for start in range(2):
        while len(list(tmp_path.glob(f"{start}-*.json"))) < 2:
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.05)
        assert locked() == [1, 2]
        (tmp_path / f"go{start}").touch()
    _, error = job.communicate(timeout=110)
    assert job.returncode == 0, error
    assert [seen for seen, _ in written(tmp_path)] == [f"{UUIDS[1]},{UUIDS[2]}"] * 4
    assert all("`lightning-tricks gpus --select 2 -- torchrun ...`" in words for _, words in written(tmp_path))
    assert locked() == []


PROGRAM = """
    import os, signal, sys
    from lightning_tricks.devices import select_gpus
    from tests.devices.fake_nvml import FakeGpu, FakeNvml
    try:
        select_gpus(nvml=FakeNvml([FakeGpu() for _ in range(4)]))
    except RuntimeError as error:
        print(str(error).splitlines()[1])
    left = [name for name in os.environ if name.startswith("LIGHTNING_TRICKS_") and not name.endswith("LOCK_DIR")]
    print(os.environ["CUDA_VISIBLE_DEVICES"], left, sys.argv[1:], flush=True)
    signal.pause()
"""


@POSIX
@cases("before, first, index", (None, f"fails={LOST}", 1), ("3,2", "utilization=99", 2), ids=["lost", "visible"])
def test_a_program_sees_its_gpus_alone_and_keeps_them_until_it_is_killed(
    before, first, index, on_fakes, monkeypatch, tmp_path
):
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    job = on_fakes("--select", 1, "--", sys.executable, script, "--", "--json", first=first)
    assert "leave select_gpus out" in job.stdout.readline()
    assert job.stdout.readline() == f"{UUIDS[index]} [] ['--', '--json']\n"
    assert locked() == [index]
    job.kill()
    assert job.stderr.read() == f"lightning-tricks gpus: {sys.executable} runs on GPU {index}\n"
    assert locked() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_is_ended_by_a_broken_pipe_as_if_it_was_started_by_a_shell(on_fakes):
    out, _ = on_fakes("--select", 1, "--", "grep", "SigIgn", "/proc/self/status").communicate(timeout=110)
    assert not int(out.split()[1], 16) & 1 << signal.SIGPIPE - 1


# The words of launchers

LAUNCHES = {
    "torchrun": {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    "mpirun": {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun@1"},
    "-- mpirun": {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    "<launcher>": {"LOCAL_RANK": "0", "MASTER_PORT": "1"},
}


@cases(  # "parent": elastic_launch in a script that has selected
    "launcher, leader", *((launcher, "") for launcher in LAUNCHES), ("<launcher>", "sweep"), ("torchrun", "parent")
)
def test_a_rank_of_a_launcher_is_told_what_to_start_instead(launcher, leader, monkeypatch):
    relic = {VARIABLE: told(UUIDS[3], leader=1 << 22 if leader == "sweep" else None)} if leader else {}
    new_process(monkeypatch, **LAUNCHES[launcher], **relic)
    words = rf"`lightning-tricks gpus --select 3 -- .*{launcher.split()[-1]} \.\.\.`"
    with pytest.raises(RankError, match=words) as error:
        select_gpus(3, nvml=nvml(4), fallback="cpu")
    assert ("call select_gpus before the Trainer runs" in str(error.value)) == (launcher == "<launcher>")
    assert state.locks == {}


@cases(
    "environment",
    {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"},
    {"SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    {"SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ids=str,
)
def test_a_rank_that_is_alone_on_its_machine_selects(environment, monkeypatch):
    new_process(monkeypatch, **environment)
    assert select_gpus(nvml=nvml(4)).devices == [0]


# Processes that another one started which has selected


WORKERS = """
    import multiprocessing, os, sys
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.core.result import state
    from tests.devices.fake_nvml import FakeGpu, FakeNvml

    selection = select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu()]))  # at the top level, as scripts do it

    def again(_):
        return selection.devices, list(state.locks), select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu()])).devices

    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(selection.devices, *pool.map(again, [0]))
"""


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_worker_that_imports_the_script_again_leaves_the_other_gpus_alone(method, gpus, tmp_path):
    if method == "forkserver" and os.name != "posix":
        pytest.skip("has no such start method")
    script = tmp_path / "train.py"
    text = textwrap.dedent(WORKERS)
    if gpus == 1:  # nothing is left for a worker to select
        text = text.replace("[FakeGpu(), FakeGpu()]", "[FakeGpu()]", 1).replace(
            ", select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu()])).devices", ""
        )
    script.write_text(text)
    result = run(script, method)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == "[0] ([0], []" + (")" if gpus == 1 else ", [1])")


@POSIX
def test_ranks_of_a_forked_child_find_the_selection_of_its_parent():
    select_gpus(2, nvml=nvml(4))
    command = (
        "from lightning_tricks.devices import select_gpus; from tests.devices.jobs import nvml; "
        "assert select_gpus(2, nvml=nvml(4)).devices == [0, 1]"
    )
    assert in_fork(lambda: run("-c", command, LOCAL_RANK="1").returncode) == 0


@pytest.mark.parametrize("before", [None, "1,2"])
def test_a_job_sees_what_its_parent_saw_before_it_selected(before, monkeypatch):
    fake = f"FakeNvml([FakeGpu(fails={LOST}), FakeGpu(), FakeGpu()])"
    code = f"""
import os
from lightning_tricks.devices import select_gpus
from tests.devices.fake_nvml import FakeGpu, FakeNvml
before = os.environ["CUDA_VISIBLE_DEVICES"]
selection = select_gpus(nvml={fake})
print(before, selection.gpus[0].index, os.environ["CUDA_VISIBLE_DEVICES"] == selection.gpus[0].uuid)
selection.release()
print(os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with select_gpus(nvml=FakeNvml([FakeGpu(fails=LOST), FakeGpu(), FakeGpu()])) as selection:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == UUIDS[1] == selection.cuda_visible_devices
        job = run("-c", code)
    assert job.stdout.split("\n")[:2] == [f"{UUIDS[1]} 2 True", str(before)], job.stderr
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
