"""The last part of `lightning-tricks demo`: a run that is killed, started again, and ends as an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_tricks._lightning_compat.flavor import LIGHTNING, Callback, LightningModule, Trainer
from lightning_tricks._shared.console import make_console, write_output
from lightning_tricks.demo import Digits, DigitsClassifier
from lightning_tricks.tricks import Tricks

KILLED_AFTER = 50  # of 76 steps, in the second epoch
_RANKS = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE")  # a launcher sets them for the demo, not for its children


def show_resume() -> None:
    """Train in three processes, of which the second is killed and the third is the same command; compare the weights.

    Raises:
        RuntimeError: If a process fails by itself, with the end of what it printed.
    """
    console = make_console(soft_wrap=True)
    console.print(f"\nA run of its own, in two epochs, is killed by SIGKILL after {KILLED_AFTER} steps:")
    with tempfile.TemporaryDirectory() as folder:
        whole = _start(Path(folder) / "whole")
        console.print(f"  undisturbed      {_line(whole)}")
        _start(Path(folder) / "killed", KILLED_AFTER)
        console.print(f"  killed           {KILLED_AFTER} steps")
        resumed = _start(Path(folder) / "killed")
    verdict = "equal, bit for bit" if resumed["weights"] == whole["weights"] else "[red]other weights[/red]"
    console.print(
        f"  started again    {_line(resumed)}, resumed at step {resumed['began_at']}: {verdict}", highlight=False
    )


def _line(result: dict[str, Any]) -> str:
    return f"{result['steps']} steps, sha256 of the weights {result['weights'][:16]}"


def _start(folder: Path, killed_after: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(folder), str(killed_after)]
    environment = {name: value for name, value in os.environ.items() if name not in _RANKS}
    run = subprocess.run(  # noqa: S603 - this module
        command, capture_output=True, text=True, env=environment, check=False
    )
    if killed_after:
        return {}
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


class _Watches(Callback):
    """Notes each step, and kills the process after a number of them."""

    def __init__(self, killed_after: int, note: Callable[[int], object]) -> None:
        self._killed_after, self._note = killed_after, note

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(trainer.global_step)
        if trainer.global_step == self._killed_after > 0:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # which on Windows is as sudden


def _train(folder: str, killed_after: int) -> dict[str, Any]:
    """Train for two epochs; resume what there is in the folder."""
    logging.getLogger(LIGHTNING).setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    resume = {"dirpath": folder, "every_n_train_steps": 10}
    model = DigitsClassifier(Tricks(seeding=42, optimizer=True, auto_resume=resume))
    steps: list[int] = []
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[_Watches(killed_after, steps.append)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Digits())
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return {"steps": trainer.global_step, "began_at": steps[0], "weights": digest.hexdigest()}


if __name__ == "__main__":
    write_output(f"{json.dumps(_train(sys.argv[1], int(sys.argv[2])))}\n")
