"""Locks: between processes, users and forks, in killed processes and notebooks, and in folders that refuse them."""

import fcntl
import os
import pickle
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from lightning_tricks._shared.file_locks import lock_holder
from lightning_tricks.devices import GpuLockError, NoGpuAvailableError, Selection, select_gpus
from lightning_tricks.devices.core import gpu_locks
from lightning_tricks.devices.core.gpu_locks import FOLDER_VARIABLE, LOCKS, choosing, lock_path
from lightning_tricks.devices.core.result import state
from tests.devices.fake_nvml import FakeGpu, FakeNvml, FakeProcess
from tests.devices.jobs import HOLD, in_fork, nvml, python

POSIX = pytest.mark.skipif(os.name != "posix", reason="forks, or has users")
ROOT = pytest.mark.skipif(getattr(os, "getuid", int)() != 0, reason="only root can become another user")


def tells_holders(folder):
    """Return whether the operating system says who holds locks in a folder; not for layered file systems."""
    descriptor = LOCKS.try_lock(folder / "test.lock")
    pid = lock_holder(folder / "test.lock")
    LOCKS.unlock(descriptor)
    return pid == os.getpid()


def finish(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out.split()


def become_nobody():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


RACE = """
    import os, sys, time
    from pathlib import Path
    from lightning_tricks.devices import select_gpus
    from tests.devices.fake_nvml import FakeGpu, FakeNvml

    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0.001)
    folder, n, gpus, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    input()
    for _ in range(rounds):
        with select_gpus(n, timeout=250, nvml=FakeNvml([FakeGpu() for _ in range(gpus)])) as found:
            assert len(found.devices) == n
            for device in found.devices:
                os.close(os.open(folder / str(device), os.O_CREAT | os.O_EXCL))  # fails if another process has it
            sleep(0)
            for device in found.devices:
                (folder / str(device)).unlink()
    print("done")
"""


# Between processes


@pytest.mark.trap("devices: two jobs in one second get two GPUs")
def test_two_jobs_that_start_at_once_get_two_gpus_and_the_third_is_told_who_has_them(lock_folder):
    jobs = [python(HOLD) for _ in range(2)]
    assert sorted(job.stdout.readline() for job in jobs) == ["0\n", "1\n"]
    with pytest.raises(NoGpuAvailableError) as error:
        select_gpus(nvml=nvml(2))
    assert str(error.value).count("is selected by ") == 2
    if tells_holders(lock_folder):
        assert all(f"is selected by process {job.pid} of " in str(error.value) for job in jobs)
    assert select_gpus(nvml=nvml(2), fallback="cpu").accelerator == "cpu"
    for job in jobs:
        job.communicate("\n", timeout=300)
    assert select_gpus(2, nvml=nvml(2)).devices == [0, 1]


@pytest.mark.parametrize(("jobs", "n", "gpus"), [(4, 1, 3), (3, 2, 2)])
def test_no_gpu_ever_has_two_holders_and_all_jobs_get_theirs(jobs, n, gpus, tmp_path):
    racers = [python(RACE, tmp_path, n, gpus, 10) for _ in range(jobs)]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert [finish(racer) for racer in racers] == [["done"]] * jobs


def test_the_lock_of_a_killed_job_ends():
    job = python(HOLD)
    assert job.stdout.readline() == "0\n"
    assert select_gpus(nvml=nvml(2)).devices == [1]
    with pytest.raises(NoGpuAvailableError):
        select_gpus(2, nvml=nvml(2))
    job.kill()
    job.communicate()
    assert select_gpus(2, nvml=nvml(2)).devices == [0, 1]


def test_without_locks_nothing_is_written_and_those_of_others_are_respected(lock_folder):
    select_gpus(nvml=nvml(1), lock=False)
    assert not lock_folder.exists()
    job = python(HOLD)
    assert job.stdout.readline() == "0\n"
    assert select_gpus(nvml=nvml(2), lock=False).devices == [1]
    job.communicate("\n")
    assert select_gpus(nvml=nvml(2), lock=False).devices == [0]


def test_who_cannot_choose_for_a_minute_is_told_who_chooses(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr("lightning_tricks.devices.core.gpu_locks.time.monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(gpu_locks.time, "sleep", sleep)
    with choosing(tmp_path):
        with pytest.raises(GpuLockError, match="has been choosing GPUs for 60 s"), choosing(tmp_path):
            pass
        assert lock_holder(tmp_path / "choosing.lock") == (os.getpid() if tells_holders(tmp_path) else None)
    with choosing(tmp_path):
        pass


# In one process


def taken(device):
    """Return whether another process finds a GPU of `nvml` locked."""
    code = f"""
        from lightning_tricks.devices.core.gpu_locks import is_locked, lock_folder, lock_path
        print(is_locked(lock_path(lock_folder(), "GPU-{device:08x}-0000-4000-8000-000000000000")))
    """
    return finish(python(code)) == ["True"]


def test_a_lock_ends_with_release_or_the_with_statement():
    with select_gpus(nvml=nvml(1)) as selection:
        assert isinstance(selection, Selection)
        assert taken(0)
    assert not taken(0)
    selection = select_gpus(nvml=nvml(1))
    selection.release()
    selection.release()
    assert not taken(0)


def test_a_second_call_replaces_the_first_selection():
    first = select_gpus(2, nvml=nvml(3))
    assert (first.devices, taken(0), taken(1)) == ([0, 1], True, True)
    second = select_gpus(nvml=FakeNvml([FakeGpu(utilization=50), FakeGpu(), FakeGpu()]))
    assert (second.devices, taken(0), taken(1)) == ([1], False, True)
    first.release()  # no longer the selection of this process
    assert taken(1)
    with pytest.raises(NoGpuAvailableError):
        select_gpus(4, nvml=nvml(3))
    assert taken(1)
    select_gpus(nvml=nvml(0), fallback="cpu")
    assert not taken(1)


@pytest.mark.parametrize("pid", [os.getpid(), 1 << 22], ids=["own", "hidden by a container"])
def test_a_cell_that_is_run_again_selects_the_gpu_that_its_model_lies_on(pid, monkeypatch):
    gpus = [FakeGpu(memory_used="1GiB"), FakeGpu()]
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [1]
    gpus[1] = FakeGpu(memory_used="79GiB", utilization=99, processes=[FakeProcess(pid, "79GiB")], compute_mode=3)
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [0]  # CUDA is not initialized: it is the load of others
    gpus[0], gpus[1] = gpus[1], FakeGpu()
    seen = [f"0000000{index}-0000-4000-8000-000000000000" for index in range(2)]
    monkeypatch.setattr("lightning_tricks.devices.core.visible_devices.uuids_seen_by_cuda", lambda: seen)
    assert select_gpus(nvml=FakeNvml(gpus)).devices == [0]
    with pytest.raises(NoGpuAvailableError, match="less than min_free_memory=90 GiB"):
        select_gpus(nvml=FakeNvml(gpus), min_free_memory="90GiB")


# Forks


@POSIX
@pytest.mark.parametrize("act", ["ends", "releases", "is finalized"])
def test_a_forked_child_leaves_the_lock_to_its_parent(act):
    code = f"""
        import os, sys
        from lightning_tricks.devices import select_gpus
        from tests.devices.fake_nvml import FakeGpu, FakeNvml
        selection = select_gpus(nvml=FakeNvml([FakeGpu()]))
        child = os.fork()
        if child == 0:
            if {act!r} == "releases":
                selection.release()
            if {act!r} == "is finalized":
                sys.exit()
            os._exit(0)
        os.waitpid(child, 0)
        print("held", flush=True)
        input()
    """
    job = python(code)
    assert job.stdout.readline() == "held\n"
    assert taken(0)
    job.communicate("\n", timeout=300)
    assert not taken(0)


@POSIX
def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent():
    code = """
        import os, signal, sys
        from lightning_tricks.devices import select_gpus
        from tests.devices.fake_nvml import FakeGpu, FakeNvml
        select_gpus(nvml=FakeNvml([FakeGpu()]))
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, b"1")
            sys.stdin.read()
            os._exit(0)
        os.read(read, 1)
        print("held", flush=True)
        signal.pause()
    """
    job = python(code)
    assert job.stdout.readline() == "held\n"
    assert taken(0)
    job.kill()
    job.wait()
    assert not taken(0)
    job.communicate("")


# Folders


@POSIX
def test_everybody_may_use_the_folder_whatever_the_umask(lock_folder):
    before = os.umask(0o077)
    try:
        select_gpus(nvml=nvml(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(lock_folder.stat().st_mode) == 0o1777
    modes = {stat.S_IMODE(path.stat().st_mode) for path in lock_folder.iterdir()}
    assert modes == {0o666}


@POSIX
@ROOT
def test_a_second_user_meets_the_locks_of_the_first(monkeypatch):
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        (Path(root) / "sticky").mkdir()
        (Path(root) / "sticky").chmod(0o1777)
        monkeypatch.setenv(FOLDER_VARIABLE, f"{root}/sticky/locks")

        def as_nobody(n):
            become_nobody()
            return select_gpus(n, nvml=nvml(2), fallback="cpu").gpus[-1:] != () and n

        selection = select_gpus(nvml=nvml(2))
        assert in_fork(lambda: as_nobody(1)) == 1
        assert in_fork(lambda: as_nobody(2)) == 0  # the CPU
        selection.release()
        assert in_fork(lambda: as_nobody(2)) == 2
        select_gpus(2, nvml=nvml(2)).release()


def test_a_folder_that_is_another_one_for_each_job_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, "locks")
    with pytest.raises(GpuLockError, match=f"{FOLDER_VARIABLE} must be an absolute path.* got 'locks'"):
        select_gpus(nvml=nvml(1))
    assert not list(tmp_path.iterdir())


@POSIX
def test_a_symbolic_link_in_the_folder_is_not_followed(lock_folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("text")
    lock_folder.mkdir()
    (lock_folder / "GPU-00000000-0000-4000-8000-000000000000.lock").symlink_to(victim)
    with pytest.raises(GpuLockError, match="cannot be used"):
        select_gpus(nvml=nvml(1))
    assert victim.read_text() == "text"
    assert not taken(0)


@POSIX
def test_a_lock_whose_file_was_removed_is_taken_again(tmp_path, monkeypatch):
    path, flock = tmp_path / "a.lock", fcntl.flock
    calls = []

    def lock(descriptor, operation):
        if not calls:
            path.unlink()  # someone tidies up between opening and locking
        calls.append(descriptor)
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    descriptor = LOCKS.try_lock(path)
    assert len(calls) == 2
    assert os.fstat(descriptor).st_ino == path.stat().st_ino
    LOCKS.unlock(descriptor)


@pytest.mark.parametrize("problem", ["a file", "below a file", "read-only", "no locks"])
def test_a_folder_that_cannot_be_used_is_named_with_the_variable(problem, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "folder"}.get(problem, tmp_path / "locks")
    monkeypatch.setenv(FOLDER_VARIABLE, str(path))

    def fails(*_, **__):
        raise OSError(30 if problem == "read-only" else 38, "Read-only file system or Function not implemented")

    if problem == "read-only":
        monkeypatch.setattr(os, "open", fails)
        path.mkdir()
    if problem == "no locks":
        monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(GpuLockError, match=f"Set {FOLDER_VARIABLE} to a local folder"):
        select_gpus(nvml=nvml(1))
    assert gpu_locks.LOCKS.held == {}
    monkeypatch.undo()


def test_one_failing_lock_gives_back_those_taken_before(lock_folder, monkeypatch):
    lock_folder.mkdir()
    lock_path(lock_folder, "GPU-00000001-0000-4000-8000-000000000000").mkdir()
    with pytest.raises(GpuLockError):
        select_gpus(2, nvml=nvml(2))
    assert not taken(0)
    assert gpu_locks.LOCKS.held == {}


INTERRUPT = """
    import fcntl, json, os, sys
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.core import gpu_locks
    from lightning_tricks.devices.core.result import state
    from tests.devices.fake_nvml import FakeGpu, FakeNvml

    FILES = ("select.py", "gpu_locks.py", "file_locks.py", "result.py", "visible_devices.py")
    lost = FakeGpu(fails={"nvmlDeviceGetHandleByIndex": "GPU_IS_LOST"})
    fake = FakeNvml([lost, FakeGpu(), FakeGpu()])
    gpu_locks.LONGEST_CHOICE = 0.0
    sys.unraisablehook = lambda _: None  # an interrupt while a generator is closed

    def locked():
        found = set()
        for path in gpu_locks.lock_folder().glob("*.lock"):
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.add(path.stem)
        return found

    def interrupted(call, at):
        steps, place = 0, None

        def trace(frame, event, _):
            nonlocal steps, place
            if os.path.basename(frame.f_code.co_filename) not in FILES:
                return None
            steps += event in ("line", "return")
            if steps == at and place is None:
                place = (frame.f_code.co_filename, frame.f_lineno, event)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return place

    def second():
        return select_gpus(2, nvml=fake)

    def release():
        state.release()

    for held, call in ((False, second), (True, second), (True, release)):
        at = 1
        while True:
            if held:
                select_gpus(1, nvml=fake)
            place = interrupted(call, at)
            assert set(state.locks) <= locked(), place  # it has what it believes to have
            with second() as selection:
                assert [gpu.index for gpu in selection.gpus] == [1, 2], place
                assert locked() == set(state.locks), place
            assert locked() == set() and "CUDA_VISIBLE_DEVICES" not in os.environ, place
            if place is None:
                break
            at += 1
        assert at > 10
    print("done")
"""


@POSIX
def test_a_selection_that_is_interrupted_anywhere_leaves_neither_locks_nor_a_belief_in_them():
    assert finish(python(INTERRUPT)) == ["done"]


@POSIX
def test_a_folder_of_a_process_that_was_killed_while_it_made_it_shuts_nobody_out(lock_folder, monkeypatch):
    def kill(*_):
        os._exit(0)

    def make():
        monkeypatch.setattr(Path, "chmod", kill)
        return gpu_locks.lock_folder()

    assert in_fork(make) == 0
    assert not lock_folder.exists()
    assert stat.S_IMODE(gpu_locks.lock_folder().stat().st_mode) == 0o1777


@POSIX
def test_who_makes_the_folder_a_moment_later_leaves_it_alone(lock_folder, monkeypatch):
    rename = Path.rename

    def other_is_faster(path, target):
        Path(target).mkdir()
        (Path(target) / "choosing.lock").touch()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", other_is_faster)
    assert select_gpus(nvml=nvml(1)).devices == [0]
    assert [path.name for path in lock_folder.parent.iterdir()] == [lock_folder.name]


def test_a_thread_that_selects_or_releases_while_another_selects_leaves_the_locks_whole(lock_folder):
    """Threads share the selection of their process; what is believed to be locked is locked at every moment."""
    failed = []

    def work(n):
        try:
            for _ in range(40):
                selection = select_gpus(n, nvml=nvml(3))
                with state.guard:
                    for descriptor in state.locks.values():
                        os.fstat(descriptor)
                        assert descriptor in gpu_locks.LOCKS.held
                selection.release()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert gpu_locks.LOCKS.held == {}


def test_the_folder_does_not_depend_on_the_temporary_folder_of_a_job(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder, _ = gpu_locks.named_folder()
    assert os.name != "posix" or folder == Path("/tmp/lightning-tricks-gpus")


def test_a_selection_is_plain_and_tells_what_it_is():
    selection = select_gpus(2, nvml=FakeNvml([FakeGpu(), FakeGpu()]))
    assert repr(selection) == (
        "Selection(accelerator='cuda', devices=[0, 1]: GPU 0 (NVIDIA H100 80GB HBM3), GPU 1 (NVIDIA H100 80GB HBM3))"
    )
    copy = pickle.loads(pickle.dumps(selection))
    assert (copy.devices, copy.gpus) == (selection.devices, selection.gpus)
    copy.release()  # it is not the copy's
    assert taken(0)


WINDOWS = """
    import ctypes, hashlib, json, logging, multiprocessing, os, pathlib, platform, psutil, subprocess, sys, tempfile
    import types, uuid

    platform.node()
    for name in ("fchmod", "O_NOFOLLOW", "O_NONBLOCK", "getuid", "register_at_fork", "major"):
        delattr(os, name)
    held = {}

    class GetModuleHandleW:
        def __call__(self, name):
            return None

    def locking(descriptor, mode, count):
        file = os.fstat(descriptor).st_ino
        if mode == 0:
            assert held.pop(file) == descriptor
        elif held.setdefault(file, descriptor) != descriptor:
            raise PermissionError

    sys.modules["fcntl"] = None
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=locking)
    ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(GetModuleHandleW=GetModuleHandleW()))
    sys.platform = "win32"
    from lightning_tricks.devices import select_gpus
    from lightning_tricks.devices.core.gpu_locks import is_locked, lock_folder, lock_path
    from tests.devices.fake_nvml import FakeGpu, FakeNvml

    assert select_gpus(fallback="cpu", nvml=FakeNvml(init_error="LIBRARY_NOT_FOUND")).devices == 1
    selection = select_gpus(nvml=FakeNvml([FakeGpu()]))
    path = lock_path(lock_folder(), selection.gpus[0].uuid)
    assert is_locked(path)
    os.environ["LOCAL_RANK"] = "0"
    selection = select_gpus(nvml=FakeNvml([FakeGpu(utilization=50)]))
    assert selection.devices == [0]
    selection.release()
    assert not is_locked(path) and not held
    os.environ.pop("LOCAL_RANK"), os.environ.pop("LIGHTNING_TRICKS_SELECTED_GPUS")

    def call(command, env):
        assert is_locked(path) and env["CUDA_VISIBLE_DEVICES"] == path.stem and command[1:] == ["-V"]
        return 3

    subprocess.call = call
    from lightning_tricks.cli import main
    with FakeNvml([FakeGpu()]):
        assert main(["gpus", "--select", "1", "--", sys.executable, "-V"]) == 3
    print("done")
"""


@POSIX
def test_nothing_is_needed_that_windows_lacks():
    """Run what Windows would run, with what Python has there."""
    assert finish(python(WINDOWS)) == ["done"]
