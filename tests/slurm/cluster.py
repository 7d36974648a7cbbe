"""A Slurm cluster of one node, from Debian's packages in a folder: nothing of the system is installed or changed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.contract.processes import free_port

PACKAGES = """
    munge libmunge2 slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm38 libhwloc15 libnuma1
""".split()  # noqa: SIM905
LIBRARIES = "usr/lib/x86_64-linux-gnu"
NODE = "localhost"  # which Lightning resolves
CONFIGURATION = """
ClusterName=one
SlurmctldHost={hostname}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
PluginDir={plugins}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd.log
SlurmdSpoolDir={run}/spool
StateSaveLocation={run}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MinJobAge=300
{requeue}
NodeName={node} NodeAddr=127.0.0.1 NodeHostname={hostname} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_missing(root: Path) -> str:
    """Unpack the packages into a folder, unless they are there; return why that is impossible, or nothing."""
    if (root / "usr/sbin/slurmd-wlm").exists():
        return ""
    if os.geteuid() != 0 or not all(map(shutil.which, ("apt-get", "dpkg"))):
        return "a cluster of one node is started by root, from Debian's packages"
    root.mkdir(parents=True, exist_ok=True)
    found = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    if found.returncode:
        return f"Debian's packages of Slurm 22.05 cannot be had here: {found.stderr.strip().splitlines()[-1]}"
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=root, check=True)
        package.unlink()
    return ""


class Cluster:
    """A cluster that runs.

    Args:
        root: Where the packages are.
        run: A folder for what it writes.

    Attributes:
        environment: The environment in which its commands work.
    """

    def __init__(self, root: Path, run: Path) -> None:
        self.run = run
        path = f"{root / 'usr/bin'}:{root / 'usr/sbin'}:{os.environ['PATH']}"
        libraries = f"{root / LIBRARIES}:{root / LIBRARIES / 'slurm-wlm'}"
        self.environment = {
            **os.environ,
            "PATH": path,
            "LD_LIBRARY_PATH": libraries,
            "SLURM_CONF": str(run / "slurm.conf"),
        }

    def command(self, *words: str | Path) -> str:
        """Run a command of Slurm, and return what it prints."""
        found = subprocess.run(
            list(map(str, words)), env=self.environment, cwd=self.run, capture_output=True, text=True, check=False
        )
        if found.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {found.stderr}")
        return found.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a job; return its number."""
        return self.command("sbatch", "--parsable", *options, script).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        text = self.command("scontrol", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: str, *states: str, restarts: int = 0, seconds: float = 120) -> dict[str, str]:
        """Wait until a job is in one of some states and was begun again so often; it is begun again at once."""
        until, hastened = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            job = self.job(number)
            if job["JobState"] in states and int(job["Restarts"]) >= restarts:
                return job
            if job["JobState"] == "PENDING" and int(job["Restarts"]) > hastened:
                hastened = int(job["Restarts"])  # two minutes otherwise; within the second its credential is revoked
                self.command("scontrol", "update", f"JobId={number}", "StartTime=now+2seconds")
            time.sleep(0.3)
        raise TimeoutError(f"job {number} is {job['JobState']} ({job['Reason']}), begun again {job['Restarts']} times")


@contextmanager
def cluster(root: Path, run: Path, requeue: str = "") -> Iterator[Cluster]:
    """Start a cluster, and stop it when the context is left.

    Args:
        root: Where the packages are.
        run: A folder for what it writes.
        requeue: A line of its configuration, such as `RequeueExit=75`.
    """
    made = Cluster(root, run)
    for name in ("spool", "state"):
        (run / name).mkdir(parents=True)
    key, socket = run / "munge.key", run / "munge.socket"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    run.chmod(0o755)
    ports = {"controller_port": free_port(), "node_port": free_port()}
    text = CONFIGURATION.format(
        node=NODE,
        hostname=os.uname().nodename,
        munge=socket,
        plugins=root / LIBRARIES / "slurm-wlm",
        run=run,
        requeue=requeue,
        **ports,
    )
    (run / "slurm.conf").write_text(text)
    munged = [f"--{name}={run}/munge.{kind}" for name, kind in (("log-file", "log"), ("pid-file", "pid"))]
    munged += [f"--seed-file={run}/munge.seed", f"--key-file={key}", f"--socket={socket}", "--force", "--foreground"]
    daemons = (
        ["munged", *munged],
        ["slurmctld-wlm", "-D", "-i"],
        ["slurmd-wlm", "-D", "-N", NODE, "-d", str(root / "usr/sbin/slurmstepd-wlm")],
    )
    started: list[subprocess.Popen[bytes]] = []
    with (run / "daemons.log").open("wb") as log:
        try:
            for words in daemons:
                started.append(subprocess.Popen(words, env=made.environment, cwd=run, stdout=log, stderr=log))
                if words[0] == "munged":
                    _wait_for(socket.exists)
            _wait_for(lambda: "idle" in made.command("sinfo", "--noheader", "--format=%T"))
            yield made
        finally:
            with_jobs = subprocess.run(
                ["scancel", "--user=root"], env=made.environment, capture_output=True, check=False
            )
            time.sleep(0.5 if with_jobs.returncode == 0 else 0)
            for daemon in reversed(started):
                daemon.terminate()
            for daemon in started:
                daemon.wait(timeout=20)


def _wait_for(is_there: object, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            if is_there():  # type: ignore[operator]
                return
        except RuntimeError:
            pass
        if time.monotonic() > until:
            raise TimeoutError("the cluster does not start: see daemons.log and slurmctld.log in its folder")
        time.sleep(0.1)
