"""One program under each Trainer, killed at some steps and started again, for `kills_side_by_side.py`.

`python _killed_programs.py Composer` runs in an environment that has mosaicml, and prints what it found as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES, EPOCHS, EVERY = 20, 4, 8  # of an epoch; epochs; steps between two saves
KILLS = range(3, BATCHES * EPOCHS, 4)  # after so many steps, when what was due then is saved
Program = Callable[[Path], None]


def net() -> nn.Sequential:
    """Return a net with dropout."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def data() -> TensorDataset:
    """Return digits."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return TensorDataset(images[: 64 * BATCHES], labels[: 64 * BATCHES])


def optimizer_and_schedule(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, and a learning rate that falls at each step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * EPOCHS)


def kill(step: int) -> None:
    """Kill this process if it has done as many steps as it may."""
    if step == int(os.environ["KILL_AFTER"]):
        os.kill(os.getpid(), signal.SIGKILL)


def note_mean(folder: Path, epoch: int, mean: float) -> None:
    """Append the mean of an epoch to what was logged."""
    with (folder / "means.jsonl").open("a") as file:
        file.write(json.dumps([epoch, float(mean).hex()]) + "\n")


def note_weights(folder: Path, module: nn.Module) -> None:
    """Write the digest of the weights."""
    parts = (value.detach().numpy().tobytes() for value in module.state_dict().values())
    (folder / "weights").write_text(hashlib.sha256(b"".join(parts)).hexdigest())


def under_lightning(with_auto_resume: bool) -> Program:
    """Return the program under Lightning, alone or with AutoResume."""
    import lightning.pytorch
    from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
    from lightning.pytorch.loggers.logger import DummyLogger

    from lightning_tricks import AutoResume

    class Module(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Means(DummyLogger):
        def __init__(self, folder: Path) -> None:
            super().__init__()
            self.folder = folder

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
            if "loss" in metrics:
                note_mean(self.folder, int(metrics["epoch"]), metrics["loss"])

    def program(folder: Path) -> None:
        lightning.pytorch.seed_everything(42, verbose=False)
        saves: Any = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=EVERY)
        if with_auto_resume:
            saves = AutoResume(folder / "checkpoints", every_n_train_steps=EVERY)
        trainer = lightning.pytorch.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            callbacks=[saves, LambdaCallback(on_train_batch_start=lambda trainer, *_: kill(trainer.global_step))],
            logger=Means(folder),
            enable_checkpointing=not with_auto_resume,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module, DataLoader(data(), 64, shuffle=True), ckpt_path=None if with_auto_resume else "last")
        note_weights(folder, module.net)

    return program


def under_composer() -> Program:
    """Return the program under Composer, which resumes by itself."""
    import composer
    from torchmetrics import MeanMetric

    class Module(composer.ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mean = net(), MeanMetric()

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1])

        def eval_forward(self, batch: list[Tensor], outputs: Tensor | None = None) -> Tensor:
            return self(batch) if outputs is None else outputs

        def update_metric(self, batch: list[Tensor], outputs: Tensor, metric: Any) -> None:
            metric.update(self.loss(outputs, batch).detach())

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"loss": self.mean} if is_train else {}

    def program(folder: Path) -> None:
        class Watch(composer.Callback):
            def batch_start(self, state: Any, logger: Any) -> None:
                kill(int(state.timestamp.batch))

            def epoch_end(self, state: Any, logger: Any) -> None:
                note_mean(folder, int(state.timestamp.epoch) - 1, state.train_metrics["loss"].compute())

        composer.utils.reproducibility.seed_all(42)
        module = Module()
        optimizer, schedule = optimizer_and_schedule(module)
        trainer = composer.Trainer(
            model=module,
            train_dataloader=DataLoader(data(), 64, sampler=composer.utils.dist.get_sampler(data(), shuffle=True)),
            optimizers=optimizer,
            schedulers=schedule,
            step_schedulers_every_batch=True,
            max_duration=f"{EPOCHS}ep",
            device="cpu",
            seed=42,
            run_name="digits",
            autoresume=True,
            save_folder=str(folder / "checkpoints"),
            save_interval=f"{EVERY}ba",
            callbacks=[Watch()],
            progress_bar=False,
        )
        trainer.fit()
        note_weights(folder, module.net)

    return program


def start(program: Program, folder: Path, after: int = -1) -> int:
    """Run a program in a fork of this process and return its exit status."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["KILL_AFTER"] = str(after)  # which nobody takes for a setting of the program
            program(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count(program: Program) -> dict[str, int]:
    """Kill a program at each of the points, start it again, and count where it ends as undisturbed."""
    random.seed(0)
    counts = {"the same weights": 0, "the same epoch means": 0}
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary, "whole")
        if start(program, whole) != 0:
            raise RuntimeError((whole / "output.txt").read_text()[-2000:])
        for after in KILLS:
            killed = Path(temporary, str(after))
            if start(program, killed, after) != -signal.SIGKILL:
                raise RuntimeError((killed / "output.txt").read_text()[-2000:])
            if start(program, killed) == 0:
                counts["the same weights"] += _text(killed / "weights") == _text(whole / "weights")
                counts["the same epoch means"] += _means(killed) == _means(whole)
            else:
                sys.stderr.write((killed / "output.txt").read_text()[-1000:])
    return counts


def _text(file: Path) -> str:
    return file.read_text()


def _means(folder: Path) -> dict[int, str]:
    """Return the last mean that was logged for each epoch."""
    return dict(json.loads(line) for line in _text(folder / "means.jsonl").splitlines())


if __name__ == "__main__":
    import composer

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {"version": composer.__version__, "torch": torch.__version__, "counts": count(under_composer())}
    sys.stdout.write(json.dumps(found) + "\n")
