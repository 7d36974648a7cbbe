"""Kill the process and its sender at random moments while checkpoints are sent, each time on a new empty machine.

`python -m tests.object_stores.kills --kills 20` is what `make kills-in-stores` runs: it ends with status 1 if a run
differed from the undisturbed one, or left objects that belong to no checkpoint. With `--result FILE` it writes a table.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import signal
import time

from tests.auto_resume.killing import resumed_at, start, wait_for
from tests.object_stores.machines import assert_as_undisturbed, assert_ends, on, output, senders, wait_until
from tests.object_stores.stores import S3Server, S3Store

BANDWIDTH = 60_000_000  # bytes a second


@dataclass
class Found:
    kills: int = 0
    resumed: int = 0  # starts from a checkpoint
    began: int = 0  # starts where nothing was complete yet


def unowned(names: set[str]) -> set[str]:
    """Return the objects of a finished run that belong to no complete checkpoint."""
    files = {name for name in names if "-epoch=" in name}
    return {name for name in files if f"{name.rpartition('/')[0]}/manifest.json" not in names}


def has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def environment(server: S3Server) -> dict[str, str]:
    """Return what s3fs reads."""
    keys = {"AWS_ACCESS_KEY_ID": "of-tests", "AWS_SECRET_ACCESS_KEY": "of-tests", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": server.url}


def kill_and_compare(folder: Path, store: S3Store, kills: int, megabytes: int, chance: random.Random) -> Found:
    """Kill a run so often, on as many machines, take it to its end on one more, and compare.

    Raises:
        AssertionError: If it ended otherwise than the undisturbed one, or left objects of no checkpoint.
    """
    found = Found()
    given = {
        "epochs": 6,
        "ballast": megabytes,
        "resume": {"every_n_train_steps": 2, "asynchronous": None},
        "loggers": ["csv"],
    }
    for number in range(kills + 1):
        machine = folder / f"machine{number}"
        options = on(machine, store.address, **given)
        if number == kills:
            assert_ends(machine, options)
        else:
            process = start(machine, options)
            wait_until(lambda one=process, on_it=machine: "saves to" in output(on_it) or has_ended(one))
            sender = [] if has_ended(process) else senders(process)
            time.sleep(chance.uniform(0, 2.5 + megabytes * 1e6 / BANDWIDTH))
            for each in (*sender, process):
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            found.kills += wait_for(process) == -signal.SIGKILL
        found.resumed += bool(resumed_at(machine))
        found.began += not resumed_at(machine)
        if number < kills:
            shutil.rmtree(machine / "resume")
    machines = [folder / f"machine{number}" for number in range(kills + 1)]
    assert_as_undisturbed(machines, folder / "whole", on(machines[-1], store.address, **given))
    assert not unowned(store.names())
    return found


def main() -> None:
    """Kill a run of 100 MB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="a file for the result")
    arguments = parser.parse_args()
    server, chance, total = S3Server(), random.Random(arguments.seed), Found()
    server.set_faults(bandwidth=BANDWIDTH, methods=["PUT"])
    with closing(server), patch.dict(os.environ, environment(server)):
        while total.kills < arguments.kills:
            with tempfile.TemporaryDirectory() as folder:
                kills = min(5, arguments.kills - total.kills)
                found = kill_and_compare(Path(folder), S3Store(server), kills, arguments.megabytes, chance)
            total = Found(*(getattr(total, name) + getattr(found, name) for name in vars(total)))
            sys.stdout.write(f"{total}\n")
    if arguments.result:
        arguments.result.write_text(
            "# What `make kills-in-stores` found\n\n"
            f"{total.kills} kills of a run and its sender at random moments while checkpoints of {arguments.megabytes} "
            f"MB are sent to an S3 server (moto) at {BANDWIDTH // 1_000_000} MB/s, with a new empty folder after each. "
            f"Of the starts, {total.resumed} resumed from a checkpoint, and {total.began} found none that was "
            "complete. All runs ended as the undisturbed one, bit for bit, and left no object without a checkpoint.\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
