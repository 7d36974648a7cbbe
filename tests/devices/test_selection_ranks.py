"""The ranks of one run use one selection: really launched by Lightning and torchrun, by srun and mpirun in words."""

import json
import os
import platform
import subprocess
import sys
import textwrap

import pytest

from lightning_tricks.devices import GpuLockError, NoGpuAvailableError, RankError, select_gpus
from lightning_tricks.devices.core import gpu_locks, rank_handoff
from lightning_tricks.devices.core.rank_handoff import VARIABLE, Launch, await_choice, find_launch, publish_choice
from lightning_tricks.devices.core.result import state
from lightning_tricks.devices.testing import FakeGpu, FakeNvml
from tests.devices.boards import LOST

UUIDS = [f"GPU-0000000{index}-0000-4000-8000-000000000000" for index in range(4)]


def nvml(count=4):
    return FakeNvml([FakeGpu() for _ in range(count)])


def new_process(monkeypatch, **environment):
    """Let this process be another one, with this environment."""
    state.forget()
    gpu_locks.LOCKS.forget()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def told(*choice, leader=None):
    """Return what a process, by default the parent of this one, tells those that it starts."""
    return f"{leader or os.getppid()}:{','.join(choice)}"


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=110
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
    from lightning_tricks.devices.testing import FakeGpu, FakeNvml

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
        job = "from lightning_tricks.devices import select_gpus; from lightning_tricks.devices.testing import *; "
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
    assert select_gpus(2, nvml=nvml()).accelerator == "cpu"


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
        select_gpus(2, nvml=nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RankError, match=rf"selected {UUIDS[3]}, which this rank does not see. This .* GPU 2, 3 of"):
        select_gpus(1, nvml=nvml())
    with pytest.raises(RankError, match="NVML does not start"):
        select_gpus(1, nvml=FakeNvml(init_error="DRIVER_NOT_LOADED"))


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "0"}])
def test_a_job_that_a_script_starts_selects_for_itself(environment, monkeypatch):
    new_process(monkeypatch, **{VARIABLE: told(UUIDS[3])}, **environment)
    assert select_gpus(nvml=nvml()).devices == [0]
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
    selection = select_gpus(nvml=nvml())
    monkeypatch.setenv("LOCAL_RANK", "0")
    selection.release()
    code = """
        from lightning_tricks.devices import select_gpus
        from lightning_tricks.devices.testing import FakeGpu, FakeNvml
        print(select_gpus(nvml=FakeNvml([FakeGpu()])).devices, flush=True)
        input()
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", VARIABLE)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    job = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "[0]\n"
    with pytest.raises(NoGpuAvailableError, match="which the ranks of this run use, is selected by"):
        select_gpus(nvml=nvml())
    job.communicate("\n", timeout=300)


# torchrun

TORCHRUN = """
    import json, os, sys
    from pathlib import Path
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.testing import FakeGpu, FakeNvml

    out, rank, start = Path(sys.argv[1]), os.environ["LOCAL_RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    gpus = [FakeGpu(), FakeGpu(), FakeGpu(), FakeGpu()]
    gpus[start].utilization = 50  # after a restart, another one is busy
    if rank == "1":
        gpus = [FakeGpu(utilization=50) for _ in gpus]
    first, again = select_gpus(2, nvml=FakeNvml(gpus)), select_gpus(2, nvml=FakeNvml(gpus))
    text = json.dumps({"start": start, "rank": rank, "first": first.devices, "again": again.devices})
    (out / f"{start}-{rank}.json").write_text(text)
    while len(list(out.glob(f"{start}-*.json"))) < 2:
        pass
    sys.exit(1 if start == 0 else 0)
"""


def test_ranks_that_torchrun_starts_share_a_selection_and_a_restarted_group_selects_anew(tmp_path, lock_folder):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TORCHRUN))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    result = run(*launcher, script, tmp_path, **{VARIABLE: told(UUIDS[3])})  # started by a script that has a GPU itself
    assert result.returncode == 0, result.stderr
    assert written(tmp_path) == [
        {"start": 0, "rank": "0", "first": [1, 2], "again": [1, 2]},
        {"start": 0, "rank": "1", "first": [1, 2], "again": [1, 2]},
        {"start": 1, "rank": "0", "first": [0, 2], "again": [0, 2]},
        {"start": 1, "rank": "1", "first": [0, 2], "again": [0, 2]},
    ]
    assert len(list(lock_folder.glob("ranks-*.json"))) == 1  # the restarted group has removed that of the first


# The words of launchers

LAUNCHES = [
    {"LOCAL_RANK": "{}", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"},
    {"SLURM_LOCALID": "{}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK": "{}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun@1"},
    {"OMPI_COMM_WORLD_LOCAL_RANK": "{}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"LOCAL_RANK": "{}", "MASTER_PORT": "1"},
    {"LOCAL_RANK": "{}", "SLURM_LOCALID": "{}", "SLURM_STEP_ID": "0"},
]


def of_rank(launch, rank):
    return {name: value.format(rank) for name, value in launch.items()}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: " ".join(launch)[:30])
def test_the_first_rank_leaves_its_selection_to_the_others(launch, monkeypatch):
    new_process(monkeypatch, **of_rank(launch, 0))
    gpus = [FakeGpu(utilization=50), FakeGpu(), FakeGpu()]
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [1]
    new_process(monkeypatch, **of_rank(launch, 1))
    monkeypatch.delenv(VARIABLE)  # it was started before
    assert select_gpus(nvml=nvml()).devices == [1]
    assert select_gpus(nvml=nvml()).devices == [1]
    assert find_launch(of_rank(launch, 0)).key == find_launch(of_rank(launch, 1)).key


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"},
        {"SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_LOCALID": "0"},
        {"LOCAL_RANK": "first"},
        {"LOCAL_RANK": "0", VARIABLE: told("cpu")},
    ],
    ids=str,
)
def test_a_process_alone_is_no_launch(environment):
    assert find_launch(environment) is None


def test_launches_are_told_apart(monkeypatch):
    """By each variable of a launcher; by the machine, the user, and the process that started them."""
    keys = [find_launch(of_rank(launch, 0)).key for launch in LAUNCHES]
    torchrun = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    for number, names in ((0, torchrun), (1, slurm), (2, ("PMIX_NAMESPACE",)), (4, ("MASTER_PORT",))):
        keys += [find_launch({**of_rank(LAUNCHES[number], 0), name: "2"}).key for name in names]
    for owner, name in ((platform, "node"), (os, "getuid"), (os, "getppid"), (rank_handoff, "start_of")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: 1)
            keys.append(find_launch(of_rank(LAUNCHES[4], 0)).key)
    assert len({*keys}) == len(keys)


def test_the_other_ranks_are_told_why_the_first_has_failed(monkeypatch):
    new_process(monkeypatch, **of_rank(LAUNCHES[0], 0))
    with pytest.raises(NoGpuAvailableError):
        select_gpus(5, nvml=nvml())
    new_process(monkeypatch, **of_rank(LAUNCHES[0], 1))
    with pytest.raises(RankError, match=r"Local rank 0, .* has failed: 4 of 4 GPUs qualify, and n=5"):
        select_gpus(5, nvml=nvml())


def test_the_cpu_is_left_to_the_other_ranks_too(monkeypatch):
    new_process(monkeypatch, **of_rank(LAUNCHES[0], 0))
    select_gpus(nvml=FakeNvml([]), fallback="cpu")
    new_process(monkeypatch, **of_rank(LAUNCHES[0], 1))
    assert select_gpus(nvml=nvml()).accelerator == "cpu"


# Processes that another one started which has selected


WORKERS = """
    import multiprocessing, os, sys
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.core.result import state
    from lightning_tricks.devices.testing import FakeGpu, FakeNvml

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


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_launcher_that_an_older_ancestor_started_share_a_selection_of_their_own(rank, monkeypatch):
    launch = {"LOCAL_RANK": "{}", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    relic = {VARIABLE: told(UUIDS[3], leader=1 << 22)}  # a sweep's driver has UUIDS[3], and has started the launcher
    assert find_launch({**of_rank(launch, rank), **relic}).local_rank == rank
    new_process(monkeypatch, **of_rank(launch, 0), **relic)
    assert select_gpus(nvml=nvml()).devices == [0]
    new_process(monkeypatch, **of_rank(launch, 1))
    monkeypatch.setenv(VARIABLE, relic[VARIABLE])
    assert select_gpus(nvml=nvml()).devices == [0]


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_ranks_of_a_forked_child_find_the_selection_of_its_parent():
    select_gpus(2, nvml=nvml())
    child = os.fork()
    if child == 0:
        code = 99
        try:
            command = (
                "from lightning_tricks.devices import select_gpus; from lightning_tricks.devices.testing import *; "
                "assert select_gpus(2, nvml=FakeNvml([FakeGpu() for _ in range(4)])).devices == [0, 1]"
            )
            code = run("-c", command, LOCAL_RANK="1").returncode
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("before", [None, "1,2"])
def test_a_job_sees_what_its_parent_saw_before_it_selected(before, monkeypatch):
    fake = f"FakeNvml([FakeGpu(fails={LOST}), FakeGpu(), FakeGpu()])"
    code = f"""
import os
from lightning_tricks.devices import select_gpus
from lightning_tricks.devices.testing import FakeGpu, FakeNvml
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


WRAPPED = """
    import os, sys, time
    from pathlib import Path
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.testing import FakeGpu, FakeNvml

    out, rank = Path(sys.argv[1]), os.environ["LOCAL_RANK"]
    gpus = [FakeGpu(), FakeGpu(utilization=50 if rank == "0" else 0), FakeGpu()]
    (out / f"{rank}.json").write_text(str(select_gpus(2, nvml=FakeNvml(gpus)).devices))
    while len(list(out.glob("*.json"))) < 2:
        pass
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_ranks_that_torchrun_starts_in_a_shell_share_a_selection(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WRAPPED))
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"#!/bin/sh\n{sys.executable} {script} {tmp_path}\nexit $?\n")
    wrapper.chmod(0o755)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python", wrapper]
    result = run(*launcher)
    assert result.returncode == 0, result.stderr
    assert written(tmp_path) == [[0, 2], [0, 2]]


def test_a_program_that_the_first_rank_starts_does_not_change_what_the_others_use(monkeypatch):
    new_process(monkeypatch, **of_rank(LAUNCHES[1], 0))
    assert select_gpus(nvml=nvml()).devices == [0]
    code = "from lightning_tricks.devices import select_gpus; from lightning_tricks.devices.testing import *; "
    code += "print(select_gpus(nvml=FakeNvml([FakeGpu(), FakeGpu()])).devices)"
    job = run("-c", code)
    assert job.stdout == "[1]\n", job.stderr
    launch = find_launch(of_rank(LAUNCHES[1], 1))
    assert await_choice(launch, 0.0) == UUIDS[:1]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: " ".join(launch)[:30])
def test_the_first_rank_selects_the_same_gpus_after_a_release(launch, monkeypatch):
    new_process(monkeypatch, **of_rank(launch, 0))
    gpus = [FakeGpu(), FakeGpu()]
    select_gpus(nvml=FakeNvml(gpus)).release()
    gpus[0].utilization = 50  # the other ranks use it
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [0]


# Files that are not to be believed

LAUNCH = Launch(1, "0" * 32)


def waited(monkeypatch):
    """Return how long a rank waits until it gives up."""
    now = [0.0]
    monkeypatch.setattr(rank_handoff.time, "monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(rank_handoff.time, "sleep", sleep)
    with pytest.raises(RankError, match="has waited 130 s for the GPUs that local rank 0"):
        await_choice(LAUNCH, 10.0)
    return round(now[0])


def publish(**changes):
    publish_choice(LAUNCH, UUIDS[:1])
    path = rank_handoff.handoff_path(LAUNCH)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_rank_does_not_wait_for_ever(monkeypatch):
    assert waited(monkeypatch) == 130


@pytest.mark.parametrize(
    "changes",
    [{"choice": "GPU-1"}, {"choice": [1]}, {"error": 1}, {"started": "1"}, {"pid": 1 << 22}, {"pid": "self"}],
    ids=str,
)
def test_a_file_that_says_something_else_is_not_read(changes, monkeypatch):
    publish()
    assert await_choice(LAUNCH, 0.0) == UUIDS[:1]
    publish(**changes)
    waited(monkeypatch)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", '{"choice": []}', '{"pid": 1' + " " * (1 << 16) + "}"])
def test_a_file_that_is_no_record_is_not_read(text, monkeypatch):
    publish().write_text(text)
    waited(monkeypatch)


@pytest.mark.skipif(os.name != "posix", reason="has no such files")
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "of another user"])
def test_a_file_of_another_kind_or_user_is_not_read(kind, monkeypatch, tmp_path):
    path = publish()
    other = path.rename(tmp_path / "other")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        other.rename(path)
        user = os.getuid() + 1
        monkeypatch.setattr(rank_handoff.os, "getuid", lambda: user)
    waited(monkeypatch)


def test_the_reason_of_a_first_rank_that_has_ended_is_read_but_not_that_of_an_earlier_one(monkeypatch):
    path = publish(pid=1 << 22, choice=[], error="no GPU")
    with pytest.raises(RankError, match="has failed: no GPU"):
        await_choice(LAUNCH, 0.0)
    os.utime(path, (1, 1))
    waited(monkeypatch)


def test_a_file_that_cannot_be_written_is_an_error_and_releases_the_gpus(monkeypatch):
    new_process(monkeypatch, **of_rank(LAUNCHES[0], 0))
    launch = find_launch(os.environ)
    rank_handoff.handoff_path(launch).mkdir()
    with pytest.raises(GpuLockError, match="LIGHTNING_TRICKS_LOCK_DIR"):
        select_gpus(nvml=nvml())
    assert state.locks == {}
    assert [path.suffix for path in rank_handoff.handoff_path(launch).parent.glob(".*")] == []


def test_the_start_of_a_process_is_the_same_for_all_who_ask_and_none_if_it_has_ended():
    assert rank_handoff.start_of(os.getpid()) == rank_handoff.start_of(os.getpid()) is not None
    code = "import os; from lightning_tricks.devices.core.rank_handoff import start_of; print(start_of(os.getppid()))"
    assert run("-c", code).stdout.strip() == rank_handoff.start_of(os.getpid())
    assert rank_handoff.start_of(1 << 22) is None
