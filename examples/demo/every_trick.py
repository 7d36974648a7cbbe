"""Train a small net on real digits with most of the tricks, and print what each one did.

`--help` lists what it passes on to the Trainer. Killed and run again, it resumes.
"""

import argparse
import logging
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from what_each_did import ROWS

from lightning_tricks import Tricks
from lightning_tricks.demo import Digits, DigitsClassifier
from lightning_tricks.run_report import read_record

CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tricks(out: Path) -> Tricks:
    """Return what is switched on; `out` is the folder of the report."""
    return Tricks(
        auto_resume={"dirpath": str(out / "resume")},
        checkpoint_remapping={"clean_on_save": True},
        device_monitor={"every_n_train_steps": 20} if find_spec("psutil") else None,
        flops_report={"backward": True, "depth": 2},
        gradient_clipping={"max_norm": 2.0, "log_norm": "all", "log_layers": True},
        hang_watch={"timeout": "10 minutes", "dirpath": str(out / "hang")},
        image_logger={"n": 16, "every_n_epochs": 5},
        metrics_monitor={
            "metrics": {"task": "multiclass", "num_classes": 10},
            "class_names": CLASSES,
            "best": {"val/f1": "max"},
        },
        microbatching=True,
        model_report={"graph": False, "depth": 2},
        optimizer={"lr": 5e-3},
        restore_best={"monitor": "val/f1", "mode": "max"},
        run_fingerprint=str(out / "fingerprint.jsonl"),
        run_report=str(out / "run"),
        schedule={"kind": "warmup_cosine", "warmup": 0.1},
        seed_everything=42,
        spike_guard="skip",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=10, help="number of epochs")
    parser.add_argument("--accelerator", default="auto", help="accelerator of the Trainer: auto, cpu, gpu, ...")
    parser.add_argument("--devices", type=int, default=1, help="number of devices of the Trainer")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer: 32-true, bf16-mixed, ...")
    parser.add_argument("--out", type=Path, default=Path("lightning_tricks_demo"), help="folder of the report")
    options = vars(parser.parse_args())
    out = options.pop("out")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tips for other products
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "(?s).*(many workers|LeafSpec|The dirpath has changed)")

    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(logger=CSVLogger(out, "logs"), log_every_n_steps=1, enable_model_summary=False, **options)
    model, data = DigitsClassifier(tricks(out)), Digits()
    trainer.fit(model, data)
    values = dict(trainer.callback_metrics)
    trainer.test(model, data, verbose=False)
    values |= trainer.callback_metrics
    logs = trainer.log_dir  # all ranks must ask: it is a broadcast
    if trainer.is_global_zero:
        show(trainer, values, out)
        shutil.rmtree(out / "resume")  # the next run starts anew
        print(f"\nLogs and checkpoint: {logs}")
        print(f"The page about this run, to open in a browser: {(out / 'run' / 'report.html').resolve()}")


def show(trainer: Trainer, values: dict[str, torch.Tensor], out: Path) -> None:
    """Print a table of what each trick did."""
    record = read_record(out / "run")  # what RunReport has recorded, over all resumes
    losses = [point.value for point in record.curve("train/loss")]
    training = {
        "steps": f"{trainer.global_step} in {trainer.current_epoch} epochs, {trainer.precision}, "
        f"{trainer.world_size} x {type(trainer.accelerator).__name__}",
        "train loss": f"{losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last",
        "loss": f"val {values['val/loss']:.3f}, test {values['test/loss']:.3f}",
        "accuracy": f"val {values['val/acc']:.1%}, test {values['test/acc']:.1%}",
    }
    table = Table("trick", "what", "in this run", title="1,797 digits, one small net, and what each trick did")
    for trick, rows in {"training": training, **{name: row(trainer, record) for name, row in ROWS.items()}}.items():
        for place, (what, text) in enumerate(rows.items()):
            table.add_row("" if place else trick, what, text, end_section=place == len(rows) - 1)
    Console().print(table)


if __name__ == "__main__":
    main()
