"""The rows of the demo's table: what each trick did in a run, asked of its callback and of the record of RunReport."""

import copy
import os
import tempfile
from math import isfinite
from pathlib import Path
from statistics import median

import numpy as np
import torch
from lightning.pytorch import Trainer

from lightning_tricks import (
    AutoResume,
    DeviceMonitor,
    FlopsReport,
    GradientClipping,
    MetricsMonitor,
    Microbatching,
    ModelReport,
    PredictionWriter,
    RestoreBest,
    SeedEverything,
    SpikeGuard,
    read_checkpoint,
    save_weights,
)
from lightning_tricks.auto_resume import CheckpointFolder
from lightning_tricks.checkpoint_remapping import align
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.finetuning import LoRASettings, add_lora, merge

# Of the Trainers that rows have for themselves
QUIET = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False),
}


def callback(trainer, kind):
    return next((one for one in trainer.callbacks if isinstance(one, kind)), None)


def auto_resume(trainer, record):
    saves = CheckpointFolder(callback(trainer, AutoResume).dirpath).manifests()[0].number
    return {"checkpoints": f"{saves}; after a kill, the same command resumes"}


def checkpoint_remapping(trainer, record):
    """Load the trained weights under the names with which DataParallel saves them."""
    wrapped = torch.nn.ModuleDict({"module": trainer.lightning_module}).state_dict()  # as DataParallel wraps it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_weights(wrapped, path, clean=False)
        found = align(trainer.lightning_module, read_checkpoint(path))
    return {"from DataParallel": f"{found.loaded} of {found.total} tensors found in a .safetensors, by themselves"}


def devices(trainer, record):
    if callback(trainer, DeviceMonitor) is None:
        return {"load": "not measured: that needs the extra 'devices'"}
    times = len(record.curve("host/data_wait"))
    return {"hardware": f"{os.cpu_count()} cores", "load": f"logged {times} times; the page has its table"}


def ensembles(trainer, record):
    """Train five members like the demo's model."""
    model, data = trainer.lightning_module, trainer.datamodule
    optimizer, schedule = model.tricks.optimizer, model.tricks.schedule
    ensemble = VotingClassifier(model.net, 5, optimizer=optimizer, lr_scheduler=schedule, seed=0)
    data.setup("fit")
    Trainer(max_epochs=trainer.max_epochs, devices=1, **QUIET).fit(
        ensemble, data.train_dataloader(), data.val_dataloader()
    )
    images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        alone = (ensemble.eval().member_outputs(images).argmax(-1) == labels).double().mean()
    together = (ensemble.predict(images).argmax(-1) == labels).double().mean()
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    unknown, known = (ensemble.predict_uncertainty(batch).epistemic.mean() for batch in (noise, images))
    return {
        "5 members": f"test accuracy {together:.1%}; one alone {alone:.1%} on average",
        "disagreement": f"{unknown / known:.0f} times as large on noise as on digits",
    }


def finetuning(trainer, record):
    """Add LoRA to a copy of the trained net, and merge it."""
    net = copy.deepcopy(trainer.lightning_module.net).cpu().eval()
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


def flops(trainer, record):
    count = callback(trainer, FlopsReport).count
    if count is None or not count.train_step_flops:
        return {"FLOPs": "not counted"}
    return {
        "parameters": f"{count.params:,}, trainable {count.trainable_params:,}",
        "forward": f"{count.macs / 1e6:.2f} MMAC a batch",
        "training step": f"{count.train_step_flops / 1e6:.2f} MFLOP a batch "
        f"({count.train_step_flops / count.flops:.2f}x forward)",
    }


def gradient_clipping(trainer, record):
    # a step that overflowed in fp16 was skipped, not clipped
    before, after = (
        [point.value for point in record.curve(f"grad_norm/{when}_clip") if isfinite(point.value)]
        for when in ("pre", "post")
    )
    clipped = sum(norm > callback(trainer, GradientClipping).max_norm for norm in before)
    return {
        "clipped steps": f"{clipped} of {len(before)} ({clipped / len(before):.1%})",
        "gradient norm before": f"median {median(before):.2f}, largest {max(before):.2f}",
        "gradient norm after": f"median {median(after):.2f}, largest {max(after):.2f}",
    }


def images(trainer, record):
    grids = list(Path(trainer.logger.log_dir, "pictures").rglob("images_*.png"))
    return {"grids of mistakes": f"{len(grids)} PNG files beside the logs"}


def lr_schedules(trainer, record):
    (optimizer,) = trainer.optimizers
    rates = [point.value for point in record.curve("learning_rate/0.0")]
    groups = ", ".join(f"{len(group['params'])} {group['name']}" for group in optimizer.param_groups)
    return {
        "optimizer": f"{type(optimizer).__name__} ({groups})",
        "learning rate": f"{rates[0]:.2g} at first, {max(rates):.2g} at step {rates.index(max(rates))}, "
        f"{optimizer.param_groups[0]['lr']:.2g} at the end",
    }


def metrics(trainer, record):
    monitor = callback(trainer, MetricsMonitor)
    value, step = monitor.best["val/f1"]
    weakest = min(monitor.class_names, key=lambda name: float(monitor.results[f"test/f1_{name}"]))
    return {
        "best": f"val/f1 {value:.3f} at step {step}",
        "test": f"f1 {monitor.results['test/f1']:.3f}, kappa {monitor.results['test/kappa']:.3f}",
        "hardest class": f"{weakest}: f1 {monitor.results[f'test/f1_{weakest}']:.3f}",
    }


def microbatching(trainer, record):
    size = callback(trainer, Microbatching).current_size
    return {"batches": "whole, as memory did not run out" if size is None else f"in parts of at most {size} rows"}


def model_report(trainer, record):
    memory = callback(trainer, ModelReport).summary.memory
    sizes = {"weights": memory.weights, "gradients": memory.gradients, "optimizer state": memory.optimizer_state}
    return {"memory": ", ".join(f"{name} {size / 1024:.1f} KiB" for name, size in sizes.items())}


def predictions(trainer, record):
    """Predict the test images by a Trainer of its own."""
    if trainer.world_size > 1:  # all ranks would have to predict
        return {"file": "not written on several ranks in the demo"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.npz"
        own = Trainer(callbacks=[PredictionWriter(path)], **QUIET)
        own.predict(copy.deepcopy(trainer.lightning_module), trainer.datamodule, return_predictions=False)
        with np.load(path) as file:
            return {"file": f"{len(file['index'])} digits in the order of the data set, {' and '.join(file)}"}


def restore_best(trainer, record):
    best = callback(trainer, RestoreBest)
    return {"tested weights": f"those of epoch {best.best_epoch}, val/f1 {best.best_value:.3f}"}


def seeding(trainer, record):
    seeds = callback(trainer, SeedEverything)
    return {
        "seed": f"{seeds.seed} (initial weights, batch order, workers)",
        "deterministic algorithms": "on" if seeds.state_dict()["deterministic_algorithms"] else "off",
    }


def spike_guard(trainer, record):
    left_out = sum(spike["left_out"] for spike in callback(trainer, SpikeGuard).spikes)
    return {"left out": f"{left_out} batches, for jumps of the loss"}


# In the order of the table
ROWS = {
    rows.__name__: rows
    for rows in (
        *(auto_resume, checkpoint_remapping, devices, ensembles, finetuning, flops, gradient_clipping, images),
        *(lr_schedules, metrics, microbatching, model_report, predictions, restore_best, seeding, spike_guard),
    )
}
