"""What each table of the package looks like in a terminal, with names as long as those of transformers' models.

`python -m tests.shared.tables` writes it at 120, 80 and 40 columns to the folder `tables`: read the diff.
"""

import io
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn

from lightning_tricks import align, save_weights
from lightning_tricks.calibration import CalibrationTable
from lightning_tricks.cli import main
from lightning_tricks.devices import Gpu
from lightning_tricks.devices.core.device_summary import DeviceSummary, device_report
from lightning_tricks.devices.core.gpu import GpuProcess
from lightning_tricks.devices.core.gpu_table import GpuTable
from lightning_tricks.devices.core.memory_report import MemoryReport, TensorMemory
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.metrics.core.history import EpochRecord, History
from lightning_tricks.model_report.core.report_summary import ModelMemory, ModelReportSummary, ParameterRow

FOLDER = Path(__file__).with_suffix("")
WIDTHS = (120, 80, 40)
_MIB, _GIB = 2**20, 2**30
# As transformers' BertForSequenceClassification names its parameters, and how large they are
_LAYER = "bert.encoder.layer.11"
NAMES = {
    "bert.embeddings.word_embeddings.weight": (30522, 768),
    "bert.embeddings.token_type_embeddings.weight": (2, 768),
    "bert.embeddings.LayerNorm.weight": (768,),
    f"{_LAYER}.attention.self.query.weight": (768, 768),
    f"{_LAYER}.attention.self.query.bias": (768,),
    f"{_LAYER}.attention.output.LayerNorm.weight": (768,),
    f"{_LAYER}.intermediate.dense.weight": (3072, 768),
    f"{_LAYER}.output.dense.bias": (768,),
    "bert.pooler.dense.weight": (768, 768),
    "classifier.weight": (2, 768),
}


def _size(name: str) -> int:
    return torch.Size(NAMES[name]).numel()


def flops(peer: bool = False) -> FlopsCount:
    """Return the counts of the modules, not those of a real call."""
    kinds = {
        "": "BertForSequenceClassification",
        "bert": "BertModel",
        "bert.embeddings": "BertEmbeddings",
        "bert.embeddings.token_type_embeddings": "Embedding",
        "bert.encoder": "BertEncoder",
        f"{_LAYER}.attention.self": "BertSdpaSelfAttention",
        f"{_LAYER}.attention.self.query": "Linear",
        f"{_LAYER}.intermediate.intermediate_act_fn": "GELUActivation",
        "classifier": "Linear",
    }
    rows = []
    for name, kind in kinds.items():
        params = sum(_size(each) for each in NAMES if each.startswith(name))
        cost = {"macs": 32 * params, "flops": 64 * params, "other_flops": 5 * params, "share": params / 27_425_280}
        shapes = {"input_shapes": ((32, 128, 768),), "output_shapes": ((32, 128, 768), (32, 768), (32, 2))}
        trains = 0 if "embeddings" in name else params
        rows.append(FlopsRow(name, kind, params, trains, calls=1, **cost, **shapes))
    totals = {"macs": rows[0].macs, "flops": rows[0].flops, "other_flops": rows[0].other_flops}
    params = {"params": rows[0].params, "trainable_params": rows[0].trainable_params}
    other = replace(flops(), backend="thop") if peer else None
    return FlopsCount(**totals, **params, train_step_flops=None, uncounted={}, rows=tuple(rows), peer=other)


def parameters() -> ModelReportSummary:
    """Return the report of a model that is not there."""
    rows = [
        ParameterRow(name, shape, "bfloat16", "embeddings" not in name, -4.06e-05 * index, 0.0199, 0.000123 * index)
        for index, (name, shape) in enumerate(NAMES.items())
    ]
    memory = ModelMemory(438 * _MIB, 4096, 438 * _MIB, 876 * _MIB)
    return ModelReportSummary("BertForSequenceClassification", tuple(rows), memory, None, None, ())


class SelfAttentionOfBert(nn.Module):
    """Has the depth and the names of a layer of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 3072), nn.LayerNorm(3072))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.query(x))


def metrics() -> Any:
    """Return the tables of a monitor with several loaders and classes."""
    history, classes = History(), ["golden_retriever", "Persian cat", "[a bird]"]
    for stage, loader, name in (("train", None, None), ("val", 0, "imagenet"), ("val", 1, "sketches"), ("test", 0, "")):
        names = ["multiclass_average_precision", "calibration_error", *(f"recall_{each}" for each in classes)]
        values = [0.98765, 1.2345e-05, 0.5, float("nan"), 1.0]
        history.add(EpochRecord(stage, loader, 3, 1200, True, names, torch.tensor(values), 0, name or None))
    best = {
        "val/imagenet/multiclass_average_precision": (0.9912, 1_000),
        "val/sketches/calibration_error": (0.0123, 12_000),
    }
    return history.table(best, classes)


def calibration() -> CalibrationTable:
    """Return the table of a calibration."""
    before = {"nll": 12.3456, "ece": 0.30771, "adaptive_ece": 0.3, "brier": float("inf")}
    return CalibrationTable("temperature", 50_000, before, dict.fromkeys(before, 0.01234), nn.Identity(), 0.24689)


def alignment() -> Any:
    """Return the report of a file of another project."""
    shapes = {name: torch.empty(*shape, device="meta") for name, shape in NAMES.items()}
    model = {f"text_encoder.{name.replace('self.query', 'self_attn.q_proj')}": value for name, value in shapes.items()}
    module = nn.Module()
    for name, value in model.items():
        *path, leaf = name.split(".")
        parent = module
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(value))
    del shapes["bert.pooler.dense.weight"]
    shapes["classifier.weight"] = torch.empty(1000, 768, device="meta")
    return align(module, shapes | {"cls.predictions.transform.LayerNorm.weight": torch.empty(768, 3)}).report()


def devices() -> Any:
    """Return the table of two ranks."""
    means = {"gpu0/utilization": 97.0, "gpu0/peak_memory_gib": 71.25, "gpu0/memory_used_gib": 72.0}
    host = {"host/data_wait": 3.0}
    products, verdict = {"gpu0": "NVIDIA H100 80GB HBM3"}, ["The GPU was busy. Nothing needs to be changed."]
    values = {"products": products, "means": means | host, "maxima": means | host, "verdict": verdict}
    return device_report([DeviceSummary(rank=rank, node=0, stage="train", **values) for rank in (0, 15)])


def gpus() -> GpuTable:
    """Return the tables of two GPUs and a process, or of fields."""
    command = "python -m train --config configs/bert-large-uncased-whole-word-masking.yaml"
    process = GpuProcess(pid=2_471_936, kind="C", memory=70 * _GIB, user="firstname.lastname", command=command)
    memory = {"memory_total": 80 * _GIB, "memory_used": 72 * _GIB, "memory_free": 8 * _GIB}
    busy = {"utilization": 100, "temperature": 71, "power": 690.0, "power_limit": 700.0, "performance_state": 0}
    gpu = {"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06", **memory, **busy}
    uuid = "GPU-00000000-0000-4000-8000-000000000000"
    own = Gpu(index=0, uuid=uuid, throttle_reasons=("power cap",), processes=(process,), **gpu)
    return GpuTable([own, Gpu(index=1, uuid=uuid, processes=(), **gpu)])


def memory() -> MemoryReport:
    """Return what is on a GPU."""
    largest = (TensorMemory(shape, "float32", 4 * _size(n), f"exp_avg_sq of {n}") for n, shape in NAMES.items())
    sizes = {"allocated": 3 * _GIB, "reserved": 4 * _GIB, "total": 80 * _GIB, "free": 76 * _GIB}
    sizes |= {"peak_allocated": 3 * _GIB, "peak_reserved": None, "in_graph": 0}
    sizes |= {"found": 3 * _GIB, "found_by_kind": {"parameters": _GIB, "optimizer states": 2 * _GIB}}
    return MemoryReport("cuda:0", **sizes, largest=tuple(largest))


def _command(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        weights = {name: torch.zeros(shape[0] // 768 + 1, 3) for name, shape in NAMES.items()}
        save_weights(weights, "bert.pt")
        main(arguments)

    return run


TABLES: dict[str, Callable[[], Any]] = {
    "alignment": alignment,
    "calibration": calibration,
    "devices": devices,
    "flops": flops,
    "flops_compared": lambda: flops(peer=True).table(depth=None),
    "gpus": gpus,
    "memory": lambda: memory().table(),
    "metrics": metrics,
    "parameters": parameters,
}
PRINTED: dict[str, Callable[[], None]] = {  # by commands
    "ckpt_show": _command("ckpt", "show", "bert.pt"),
    "schedule": _command("schedule", "--total", "100000"),
}


def rendered(name: str, width: int) -> str:
    """Return a table as a terminal of this width shows it, without colors and without blanks at the ends of lines."""
    output = io.StringIO()
    if name in TABLES:
        Console(file=output, width=width, color_system=None).print(TABLES[name]())
    else:
        before = Path.cwd()
        with patch.dict(os.environ, COLUMNS=str(width)), tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                with redirect_stdout(output):
                    PRINTED[name]()
            finally:
                os.chdir(before)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in (*TABLES, *PRINTED):
        for width in WIDTHS:
            (FOLDER / f"{name}-{width}.txt").write_text(rendered(name, width), encoding="utf-8")
