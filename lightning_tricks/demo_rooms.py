"""What each trick does in `lightning-tricks demo`: the fields of `Tricks` that it sets, and its rows of the table.

A trick takes part by an entry in `demo_fields` and a function in `ROWS`, which gets the Trainer after the fit and the
logged values of each step, and returns label -> text.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_tricks._lightning_compat.flavor import Trainer
from lightning_tricks._lightning_compat.trainer import callbacks_of_type, datamodule_of
from lightning_tricks._shared.text import format_bytes, format_si
from lightning_tricks.auto_resume import AutoResume, CheckpointFolder
from lightning_tricks.checkpoint_remapping import align, read_checkpoint, save_weights
from lightning_tricks.devices import DeviceMonitor
from lightning_tricks.devices.core.utilization import available_cores
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.finetuning import LoRASettings, add_lora, merge
from lightning_tricks.flops import FlopsReport
from lightning_tricks.metrics import MetricsMonitor
from lightning_tricks.microbatching import Microbatching
from lightning_tricks.model_report import ModelReport
from lightning_tricks.predictions import PredictionWriter
from lightning_tricks.restore_best import RestoreBest
from lightning_tricks.run_fingerprint import RunFingerprint
from lightning_tricks.run_fingerprint.core.record import read_record
from lightning_tricks.run_report import RunReport
from lightning_tricks.run_report.core.record_file import PAGE_FILE
from lightning_tricks.seeding import SeedEverything
from lightning_tricks.spike_guard import SpikeGuard

Rows: TypeAlias = dict[str, str]
History: TypeAlias = Sequence[Mapping[str, float]]

_MAX_NORM = 2.0
_MEMBERS = 5
_TIMEOUT = "10 minutes"
# Of the Trainers that rows have for themselves
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False),
}
_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def demo_fields(seed: int, out: Path) -> dict[str, Any]:
    """Return the fields of `Tricks` that the demo sets; `out` is the report folder."""
    preset = {"task": "multiclass", "num_classes": 10}
    return {
        "auto_resume": {"dirpath": str(out / "resume")},
        "checkpoint_remapping": {"clean_on_save": True},
        "device_monitor": {"every_n_train_steps": 20} if find_spec("psutil") else None,
        "flops": {"backward": True, "depth": 2},
        "gradient_clipping": {"max_norm": _MAX_NORM, "log": "all", "log_layers": True},
        "hang_watch": {"timeout": _TIMEOUT, "dirpath": str(out / "hang")},
        "images": {"n": 16, "every_n_epochs": 5},
        "metrics": {"metrics": preset, "class_names": _DIGITS, "best": {"val/f1": "max"}},
        "microbatching": True,
        "model_report": {"graph": False, "depth": 2},
        "optimizer": {"lr": 5e-3},
        "schedule": {"kind": "warmup_cosine", "warmup": 0.1},
        "restore_best": {"monitor": "val/f1", "mode": "max"},
        "run_fingerprint": str(out / "fingerprint.jsonl"),
        "run_report": str(page_path(out).parent),
        "seeding": seed,
        "spike_guard": "skip",
    }


def page_path(out: Path) -> Path:
    """Return where the page about the demo's run is."""
    return out / "run" / PAGE_FILE


def _auto_resume(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, AutoResume)
    saves = CheckpointFolder(callback.dirpath).manifests()[0].number
    return {"checkpoints": f"{saves}; after a kill, the same command resumes"}


def _checkpoint_remapping(trainer: Trainer, history: History) -> Rows:
    """Load the trained weights under the names with which DataParallel saves them."""
    module = trainer.lightning_module
    wrapped = torch.nn.ModuleDict({"module": module}).state_dict()  # as DataParallel wraps it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_weights(wrapped, path, clean=False)
        found = align(module, read_checkpoint(path))
    return {"from DataParallel": f"{found.loaded} of {found.total} tensors found in a .safetensors, by themselves"}


def _devices(trainer: Trainer, history: History) -> Rows:
    if not callbacks_of_type(trainer, DeviceMonitor):
        return {"load": "not measured: that needs the extra 'devices'"}
    times = sum("host/data_wait" in step for step in history)
    return {"hardware": f"{available_cores()} cores", "load": f"logged {times} times; the page has its table"}


def _ensembles(trainer: Trainer, history: History) -> Rows:
    """Train five members like the demo's model."""
    model: Any = trainer.lightning_module
    data: Any = datamodule_of(trainer)
    ensemble = VotingClassifier(
        model.net, _MEMBERS, optimizer=model.tricks.optimizer, lr_scheduler=model.tricks.schedule, seed=0
    )
    own = Trainer(max_epochs=trainer.max_epochs, devices=1, **_QUIET)
    data.setup("fit")
    own.fit(ensemble, data.train_dataloader(), data.val_dataloader())
    images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        singles = ensemble.eval().member_outputs(images).argmax(-1)
    mean = (singles == labels).double().mean()
    together = (ensemble.predict(images).argmax(-1) == labels).double().mean()
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    unknown = ensemble.predict_uncertainty(noise).epistemic.mean()
    known = ensemble.predict_uncertainty(images).epistemic.mean()
    return {
        f"{_MEMBERS} members": f"test accuracy {together:.1%}; one alone {mean:.1%} on average",
        "disagreement": f"{unknown / known:.0f} times as large on noise as on digits",
    }


def _finetuning(trainer: Trainer, history: History) -> Rows:
    """Add LoRA to a copy of the trained net, and merge it."""
    net: Any = copy.deepcopy(trainer.lightning_module.net)
    net.cpu().eval()
    report = add_lora(net, LoRASettings(rank=4))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".B"):
                parameter.fill_(0.01)
        images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        before, after = net(images), merge(net)(images)
    share = f"{report.trainable:,} of {report.total:,} values ({report.trainable / report.total:.1%})"
    difference = (before - after).abs().max()
    return {"LoRA of rank 4": f"would train {share}; merged into the weights, outputs differ by {difference:.6f}"}


def _flops(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, FlopsReport)
    count = callback.count
    if count is None:
        return {"FLOPs": "not counted"}
    ratio = f" ({count.train_step_flops / count.flops:.2f}x forward)" if count.train_step_flops else ""
    return {
        "parameters": f"{format_si(count.params)}, trainable {format_si(count.trainable_params)}",
        "forward": f"{format_si(count.macs, 'MAC')} a batch",
        "training step": f"{format_si(count.train_step_flops or 0, 'FLOP')} a batch{ratio}",
    }


def _gradient_clipping(trainer: Trainer, history: History) -> Rows:
    def finite(key: str) -> list[float]:  # a step that overflowed in fp16 was skipped, not clipped
        return [step[key] for step in history if isfinite(step.get(key, nan))]

    before, after = finite("grad_norm/pre_clip"), finite("grad_norm/post_clip")
    clipped = sum(norm > _MAX_NORM for norm in before)
    return {
        "clipped steps": f"{clipped} of {len(before)} ({clipped / len(before):.1%})",
        "gradient norm before": f"median {median(before):.2f}, largest {max(before):.2f}",
        "gradient norm after": f"median {median(after):.2f}, largest {max(after):.2f}",
    }


def _hang_watch(trainer: Trainer, history: History) -> Rows:
    return {"stacks": f"would be written after {_TIMEOUT} without a move"}


def _images(trainer: Trainer, history: History) -> Rows:
    grids = list(Path(str(getattr(trainer.logger, "log_dir", "")), "pictures").rglob("images_*.png"))
    return {"grids of mistakes": f"{len(grids)} PNG files beside the logs"}


def _lr_schedules(trainer: Trainer, history: History) -> Rows:
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    scheduler: Any = config.scheduler
    rates = [
        scheduler.factor(step) * optimizer.param_groups[0]["initial_lr"] for step in range(trainer.global_step + 1)
    ]
    groups = ", ".join(f"{len(group['params'])} {group['name']}" for group in optimizer.param_groups)
    return {
        "optimizer": f"{type(optimizer).__name__} ({groups})",
        "learning rate": f"{rates[0]:.2g} at first, {max(rates):.2g} at step {rates.index(max(rates))}, "
        f"{optimizer.param_groups[0]['lr']:.2g} at the end",
    }


def _metrics(trainer: Trainer, history: History) -> Rows:
    (monitor,) = callbacks_of_type(trainer, MetricsMonitor)
    value, step = monitor.best["val/f1"]
    weakest = min(_DIGITS, key=lambda name: float(monitor.results[f"test/f1_{name}"]))
    return {
        "best": f"val/f1 {value:.3f} at step {step}",
        "test": f"f1 {monitor.results['test/f1']:.3f}, kappa {monitor.results['test/kappa']:.3f}",
        "hardest class": f"{weakest}: f1 {monitor.results[f'test/f1_{weakest}']:.3f}",
    }


def _microbatching(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, Microbatching)
    size = callback.current_size
    return {"batches": "whole, as memory did not run out" if size is None else f"in parts of at most {size} rows"}


def _model_report(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, ModelReport)
    if callback.summary is None:
        return {"memory": "not measured"}
    memory = callback.summary.memory
    sizes = [f"weights {format_bytes(memory.weights)}", f"gradients {format_bytes(memory.gradients)}"]
    return {"memory": ", ".join([*sizes, f"optimizer state {format_bytes(memory.optimizer_state)}"])}


def _predictions(trainer: Trainer, history: History) -> Rows:
    """Predict the test images by a Trainer of its own."""
    if trainer.world_size > 1:  # all ranks would have to predict
        return {"file": "not written on several ranks in the demo"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.npz"
        own = Trainer(callbacks=[PredictionWriter(path)], **_QUIET)
        own.predict(copy.deepcopy(trainer.lightning_module), datamodule_of(trainer), return_predictions=False)
        with np.load(path) as file:
            return {"file": f"{len(file['index'])} digits in the order of the data set, {' and '.join(file)}"}


def _restore_best(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, RestoreBest)
    return {"tested weights": f"those of epoch {callback.best_epoch}, val/f1 {callback.best_value:.3f}"}


def _run_fingerprint(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, RunFingerprint)
    path = Path(callback.path)
    size = format_bytes(path.stat().st_size)
    return {"recorded": f"{len(read_record(path)) - 1} steps in {size}, to compare with another run"}


def _run_report(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, RunReport)
    return {"page": f"{Path(callback.path).name}/{PAGE_FILE}, to open in a browser"}


def _seeding(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, SeedEverything)
    settings = callback.state_dict()
    return {
        "seed": f"{callback.seed} (initial weights, batch order, workers)",
        "deterministic algorithms": "on" if settings["deterministic_algorithms"] else "off",
    }


def _spike_guard(trainer: Trainer, history: History) -> Rows:
    (callback,) = callbacks_of_type(trainer, SpikeGuard)
    return {"left out": f"{sum(spike['left_out'] for spike in callback.spikes)} batches, for jumps of the loss"}


# In the order of the table
ROWS: Mapping[str, Callable[[Trainer, History], Rows]] = {
    "auto_resume": _auto_resume,
    "checkpoint_remapping": _checkpoint_remapping,
    "devices": _devices,
    "ensembles": _ensembles,
    "finetuning": _finetuning,
    "flops": _flops,
    "gradient_clipping": _gradient_clipping,
    "hang_watch": _hang_watch,
    "images": _images,
    "lr_schedules": _lr_schedules,
    "metrics": _metrics,
    "microbatching": _microbatching,
    "model_report": _model_report,
    "predictions": _predictions,
    "restore_best": _restore_best,
    "run_fingerprint": _run_fingerprint,
    "run_report": _run_report,
    "seeding": _seeding,
    "spike_guard": _spike_guard,
}
