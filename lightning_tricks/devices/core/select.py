"""Select GPUs that are free, and keep other processes from selecting them too."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._shared.file_locks import lock_holder
from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks.devices.core import gpu_locks
from lightning_tricks.devices.core.nvml import NvmlUnavailableError
from lightning_tricks.devices.core.result import (
    CPU,
    NoGpuAvailableError,
    RankError,
    Selection,
    has_launched_ranks,
    inherited_choice,
    refuse_to_choose,
    repeated_choice,
    state,
)
from lightning_tricks.devices.core.scoring import Request, describe_owner, in_order, parse_size, refusal
from lightning_tricks.devices.core.visible_devices import Machine, VisibleDevice, hidden_gpus, see_machine

_REMEDY = "Relax these limits, wait with timeout=<seconds>, or train without a GPU with fallback='cpu'."


def select_gpus(
    n: int = 1,
    *,
    min_free_memory: int | str = "8GiB",
    max_utilization: float | None = 10,
    max_temperature: float | None = None,
    prefer: Literal["free_memory", "idle", "cool"] = "free_memory",
    timeout: float = 0,
    fallback: Literal["cpu"] | None = None,
    lock: bool = True,
    nvml: Any = None,
) -> Selection:
    """Select free GPUs for this process only.

    It reads NVML and creates no CUDA context. It honors CUDA_VISIBLE_DEVICES, and sets CUDA_DEVICE_ORDER to PCI_BUS_ID
    if CUDA is not initialized yet. A lock keeps other processes that call this function from selecting the same GPUs,
    until this process ends, however it ends, or until `Selection.release`. A second call in one process, even in
    another thread, replaces the first selection. The locks are files in /tmp/lightning-tricks-gpus (on Windows, in the
    temporary folder of the user), or in the folder LIGHTNING_TRICKS_LOCK_DIR.

    Ranks that Lightning starts use the selection of the process that starts them. If torchrun, srun or mpirun starts
    the ranks, run `lightning-tricks gpus --select N -- torchrun ...` to select GPUs for all: calling this function
    raises an error there. Processes that multiprocessing spawns, and which import the script again, repeat its
    selection; other programs that a script starts select for themselves. If CUDA is not initialized, a process may
    select one slice of a GPU in MIG mode; CUDA_VISIBLE_DEVICES is then set to it.

    Args:
        n: The number of GPUs.
        min_free_memory: The free memory that each must have, in bytes or as text such as "8GiB"; 0 for no limit.
        max_utilization: The highest utilization allowed, in percent; None for no limit.
        max_temperature: The highest temperature allowed, in degrees Celsius; None for no limit. A limit does not apply
            to GPUs that do not report the value, but they are selected last.
        prefer: Which GPUs are selected first: the ones with most free memory ("free_memory"), the least busy with the
            fewest processes ("idle"), or the coolest ("cool"); among equals, GPUs that drive a display come last.
        timeout: Seconds to wait until enough GPUs are free.
        fallback: "cpu" to select the CPU if there is no driver, no GPU, or no free GPU; None to raise an error.
        lock: Whether to lock the GPUs. GPUs that other processes have locked are never selected.
        nvml: A replacement for the module `pynvml`; None imports it.

    Returns:
        The selection, for `Trainer(accelerator=selection.accelerator, devices=selection.devices)`.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, CUDA would drop a part of CUDA_VISIBLE_DEVICES, or CUDA_DEVICE_ORDER
            requests an order other than NVML's.
        NoGpuAvailableError: If too few GPUs are free; the message gives the reason for each.
        GpuLockError: If the folder of the locks cannot be used. LIGHTNING_TRICKS_LOCK_DIR sets another one.
        RankError: If a launcher has started this process with other ranks, or this rank cannot use the selection of
            the process that started it.
        ModuleNotFoundError: If a package of the extra `devices` is missing.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> with select_gpus(fallback="cpu") as selection:
        ...     trainer = Trainer(accelerator=selection.accelerator, devices=selection.devices)
    """
    memory = parse_size("min_free_memory", min_free_memory)
    request = Request(n, memory, max_utilization, max_temperature, prefer, timeout, fallback, bool(lock))
    repeated = repeated_choice(os.environ)
    if repeated is not None:
        return _use(repeated, replace(request, n=len(repeated)), nvml)
    choice = state.choice if has_launched_ranks(os.environ) else None
    if choice is None:
        choice = inherited_choice(os.environ)
    if choice is not None:
        return _use(choice, request, nvml)
    refuse_to_choose(os.environ, request.n)
    return _choose(request, nvml)


def _choose(request: Request, nvml: Any) -> Selection:
    deadline = time.monotonic() + request.timeout
    said = False
    while True:
        try:
            with state.changing():
                return _choose_now(request, nvml)
        except NoGpuAvailableError as error:
            left = deadline - time.monotonic()
            if error.final or left <= 0:
                if request.fallback is None:
                    raise
                lightning_logger("devices").warning("select_gpus selects the CPU. %s", error)
                with state.changing():
                    return state.take(Selection("cpu", 1))
            if not said:
                lightning_logger("devices").warning("select_gpus waits up to %g s. %s", request.timeout, error)
                said = True
        time.sleep(min(1.0, left))


def _choose_now(request: Request, nvml: Any) -> Selection:
    try:
        machine = see_machine(state.visible_value(), nvml)
    except NvmlUnavailableError as error:
        raise NoGpuAvailableError(f"No GPU can be selected: {error}", final=True) from error
    used = state.locks if machine.cuda_initialized else {}  # what this process may have memory on
    problems = {device.key: refusal(device, request, device.key in used) for device in machine.devices}
    qualified = [device for device in machine.devices if problems[device.key] is None]
    if len(qualified) < request.n:
        raise _shortage(machine, problems, request)
    folder = gpu_locks.lock_folder() if request.lock else gpu_locks.existing_lock_folder()
    with gpu_locks.choosing(folder) if folder else nullcontext():
        chosen: list[VisibleDevice] = []
        locks: dict[str, int] = {}
        for device in in_order(qualified, request, used):
            if len(chosen) == request.n:
                break
            problems[device.key] = _take(device.key, folder, request.lock, locks)
            if problems[device.key] is None:
                chosen.append(device)
        if len(chosen) < request.n:
            raise _shortage(machine, problems, request)
        return _commit(chosen, machine, locks)


def _take(key: str, folder: Path | None, lock: bool, locks: dict[str, int]) -> str | None:
    """Lock a device if `lock` is set, and return None, or say which process has locked it."""
    if folder is None:
        return None
    path = gpu_locks.lock_path(folder, key)
    if key in state.locks:
        if lock:
            locks[key] = state.locks[key]
        return None
    if not lock:
        locked = gpu_locks.is_locked(path)
    else:
        descriptor = gpu_locks.try_lock(path)
        locked = descriptor is None
        if descriptor is not None:
            locks[key] = descriptor
    if not locked:
        return None
    holder = lock_holder(path)
    if holder == os.getpid():  # `lightning-tricks gpus --select` has become this program, and left it the lock
        return "is selected for this program by `lightning-tricks gpus --select`: leave select_gpus out"
    return f"is selected by {describe_owner(holder)}"


def _commit(chosen: Sequence[VisibleDevice], machine: Machine, locks: dict[str, int], leads: bool = True) -> Selection:
    chosen = sorted(chosen, key=lambda device: (machine.numbers[device.key], device.gpu.index))
    indices, visible = machine.address(chosen)
    names = [device.uuid for device in chosen]
    if None in names:
        names = [str(device.gpu.index) for device in chosen]
    selection = Selection("cuda", indices, tuple(device.gpu for device in chosen), ",".join(map(str, names)))
    return state.take(selection, [device.key for device in chosen], locks, visible, leads)


@state.changing()
def _use(choice: Sequence[str], request: Request, nvml: Any) -> Selection:
    """Select what the first rank has chosen, whatever limits say: the other ranks use it already."""
    leads = state.leads and state.choice is not None
    if list(choice) == [CPU]:
        return state.take(Selection("cpu", 1), leads=leads)
    if len(choice) != request.n:
        raise RankError(
            f"The ranks of this run use {len(choice)} selected GPUs ({', '.join(choice)}), and n={request.n}. All "
            "calls of select_gpus in a script that runs on multiple ranks must request the same number."
        )
    try:
        machine = see_machine(state.visible_value(), nvml)
    except NvmlUnavailableError as error:
        raise RankError(f"This rank cannot use the selected GPUs: {error}") from error
    known = {device.key: device for device in machine.devices}
    missing = [key for key in choice if key not in known]
    if missing:
        raise RankError(
            f"The first rank of this machine has selected {', '.join(missing)}, which this rank does not see."
            f"{hidden_gpus(machine)} All ranks must see the same GPUs; if a launcher gives one to each rank, "
            "devices='auto' replaces select_gpus."
        )
    locks: dict[str, int] = {}
    if leads and request.lock:
        folder = gpu_locks.lock_folder()
        for key in choice:
            problem = _take(key, folder, True, locks)
            if problem is not None:
                raise NoGpuAvailableError(f"{known[key].label}, which the ranks of this run use, {problem}.")
    return _commit([known[key] for key in choice], machine, locks, leads)


def _shortage(machine: Machine, problems: Mapping[str, str | None], request: Request) -> NoGpuAvailableError:
    possible = [device for device in machine.devices if device.part is None or request.n == 1]
    good = sum(problem is None for problem in problems.values())
    if not machine.gpus:
        return NoGpuAvailableError("No GPU can be selected: the NVIDIA driver finds none.", final=True)
    if not machine.devices:
        return NoGpuAvailableError(f"No GPU can be selected.{hidden_gpus(machine)}", final=True)
    lines = [f"  {device.label}: {problems[device.key] or 'qualifies'}" for device in machine.devices]
    message = "\n".join(
        [f"{good} of {len(lines)} GPUs qualify, and n={request.n}.{hidden_gpus(machine)}", *lines, _REMEDY]
    )
    return NoGpuAvailableError(message, final=len(possible) < request.n)
