"""A run on several nodes, each a process of this machine with one rank and a folder that is its disk."""

import hashlib
import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.auto_resume.killing import differences, start, wait_for
from tests.auto_resume.training import DEFAULTS, fit
from tests.contract.processes import free_port
from tests.object_stores.kills import has_ended, unowned
from tests.object_stores.machines import SCRATCH, SHORT, on, output, senders, wait_until
from tests.object_stores.stores import FolderStore
from tests.small import ranks_agree_at_once

SHARDED = {**SHORT, "strategy": "fsdp2", "ranks": 2, "sanity": 0}


def start_nodes(machines: list[Path], address: str, *of_each: dict[str, Any], **options: Any) -> list[int]:
    """Start a node on each of the machines, with options of its own; return their processes."""
    port = free_port()

    def script(folder: Path, options: dict[str, Any]) -> None:
        number = machines.index(folder)
        os.environ.update(NODE_RANK=f"{number}", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
        os.environ.update(options.pop("environment", {}))
        with ranks_agree_at_once():
            fit(folder, {**DEFAULTS, **options})

    given = [{**SHARDED, "nodes": len(machines), **options, **more} for more in of_each or [{}] * len(machines)]
    pairs = zip(machines, given, strict=True)
    return [start(machine, on(machine, address, **each), script=script) for machine, each in pairs]


def run_nodes(machines: list[Path], address: str, *of_each: dict[str, Any], **options: Any) -> list[int]:
    """Run the nodes, and return their exit statuses."""
    return [wait_for(process) for process in start_nodes(machines, address, *of_each, **options)]


def said(machines: list[Path]) -> str:
    return "\n".join(output(machine)[-3000:] for machine in machines)


def assert_equal(machines: list[Path], whole: Path) -> None:
    """Check that a run has left on its machines what the undisturbed one has left in a folder."""
    for number, machine in enumerate(machines[1:], start=1):
        shutil.copy(machine / f"end.{number}.json", machines[0])
    assert differences(machines[0], whole) == []


def assert_complete(store: FolderStore) -> set[str]:
    """Check that each checkpoint that has a manifest has the bytes that it names; return their names."""
    names = store.names()
    found = {name.rpartition("/")[0] for name in names if name.endswith("/manifest.json")}
    for place in found:
        manifest = json.loads(store.read(f"{place}/manifest.json"))
        for file, (digest, _) in {**manifest["shards"], "meta.pt": (manifest["sha256"], 0)}.items():
            of_node = f"{place}/{file}.{digest}"
            data = store.read(of_node if of_node in names else f"{place}/{file}")
            assert hashlib.sha256(data).hexdigest() == digest, f"{place}/{file}"
    return {place.rpartition("/")[2] for place in found}


def kill_and_resume(machines: list[Path], store: FolderStore, kills: int, chance: random.Random, **options: Any) -> int:
    """Kill nodes of a run so often at random moments, with disks that are lost or not, and take it to its end.

    Returns:
        The number of starts that resumed from a checkpoint.
    """
    resume, resumed = {"asynchronous": True, "send_timeout": {"seconds": 3}}, 0
    for number in range(kills + 1):
        before = len(output(machines[0]))
        processes = start_nodes(machines, store.address, resume=resume, **options)
        if number < kills:
            wait_until(
                lambda at=before, all_of=processes: (
                    "saves to" in output(machines[0])[at:] or any(map(has_ended, all_of))
                )
            )
            kill_at_a_moment(processes, chance)
        statuses = [wait_for(process) for process in processes]
        resumed += "the run resumes at" in output(machines[0])[before:]
        for machine in chance.choice([machines, machines[:1], machines[1:], []]) if number < kills else ():
            shutil.rmtree(machine / SCRATCH, ignore_errors=True)
    assert statuses == [0, 0], said(machines)
    assert_complete(store)
    assert not unowned(store.names())
    return resumed


def kill_at_a_moment(processes: list[int], chance: random.Random) -> None:
    """Kill a node or both, with the senders or without, and soon after what is left of the others."""
    time.sleep(chance.uniform(0, 4))
    for process in chance.choice([processes[:1], processes[1:], processes]):
        sender = [] if has_ended(process) or chance.random() < 0.3 else senders(process)
        for each in (*sender, process):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    until = time.monotonic() + 4
    while not all(map(has_ended, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    for process in processes:  # as a launcher does
        if not has_ended(process):
            os.kill(process, signal.SIGKILL)
