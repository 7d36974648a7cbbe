"""Runs of Ray Train on a local cluster, with all callbacks: `program.py FOLDER HOW...`."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import ray
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, Subset

from lightning_tricks import AutoResume
from tests.contract.cases import CASES
from tests.small import QUIET, Hooks, digits
from tests.together.everything import TogetherNet, make_all, write_pretrained
from tests.together.fits import VALIDATED, First, Last

DISTURBED = {"killed": (7, 1), "drained": (2, 0)}  # after which of ten steps, and which rank
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class LossNet(TogetherNet):
    """Logs the mean of each rank's losses."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("train/loss", outputs["loss"], on_step=False, on_epoch=True)
        return outputs


def train(config):
    """What each worker runs, again where it is started again."""
    torch.set_num_threads(1)
    folder, how = Path(config["folder"]), config["how"]
    saves = {"every_n_epochs": None, "every_n_train_steps": 3 if how == "killed" else None}
    callbacks = {**make_all(list(CASES), folder), "AutoResume": AutoResume(folder / "runs", **saves)}
    if how == "drained":  # through an object store, as each node has a disk of its own
        scratch = folder / f"node {ray.get_runtime_context().get_node_id()}"
        callbacks["AutoResume"] = AutoResume(f"file://{folder}/store", scratch=scratch, **saves)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    first = First()
    last = Last(first, folder, callbacks)
    trainer = Trainer(
        **{**QUIET, "logger": CSVLogger(folder, version=0, flush_logs_every_n_steps=1)},
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        devices="auto",
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[first, *callbacks.values(), RayTrainReportCallback(), disturbs(config, folder / "disturbed"), last],
    )
    data = digits()
    loaders = [DataLoader(data, 4, shuffle=True), DataLoader(Subset(data, range(VALIDATED)), 4)]
    prepare_trainer(trainer).fit(LossNet(dropout=0.2), *loaders)


def disturbs(config, marker):
    """Kill a worker; or let Ray lose its node in 20 seconds, take 3 for each step, and not end before that."""
    (step, rank), disturbed_before = DISTURBED.get(config["how"], (99, 0)), marker.exists()

    def disturb(trainer, *_):
        if disturbed_before or trainer.global_step < step:
            return
        if (trainer.global_step, trainer.global_rank) == (step, rank):
            marker.touch()
            if config["how"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            subprocess.run([*config["drain"], "--node-id", ray.get_runtime_context().get_node_id()], check=True)
        time.sleep(3 if trainer.global_step < 8 else 60)

    return Hooks(on_train_batch_end=disturb)


def main(root, *hows):
    """Start a cluster of two nodes and a head, and train in each of these ways in turn; a node is lost in the last."""
    os.environ.update(ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(cluster.address, runtime_env={"env_vars": {**ENVIRONMENT, "PYTHONPATH": os.environ["PYTHONPATH"]}})
    drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    drain += ["--deadline-remaining-seconds", "20"]
    for how in hows:
        folder = Path(root) / how
        folder.mkdir()
        write_pretrained(folder)
        failures = FailureConfig(max_failures=2) if how == "killed" else None
        TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "how": how, "drain": drain},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
            run_config=RunConfig(how, str(folder / "storage"), failure_config=failures),
        ).fit()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
