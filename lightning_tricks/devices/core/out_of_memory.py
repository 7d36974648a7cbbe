"""Errors that say that memory ran out, what to do about it, and the text of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_tricks._shared.text import describe_error, format_bytes, format_shape
from lightning_tricks.devices.core.memory_report import MemoryReport

_REQUESTED = re.compile(r"(?i)(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)")
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
_MOST_LINES = 40
_DEEPEST = 5
_LARGE_SHARE = 0.25  # of what is allocated
_NOTABLE_SHARE = 0.1  # of the device's memory
_CONTEXT = 2**30  # bytes: CUDA contexts and libraries take less


def is_of_worker(error: BaseException) -> bool:
    """Whether an error was raised in a worker process of a DataLoader."""
    return "in DataLoader worker process" in str(error)


def requested_bytes(error: BaseException) -> int | None:
    """Return how much memory was asked for when it ran out, as the error says it."""
    found = _REQUESTED.search(str(error)) or _REQUESTED.search(str(error.__cause__ or ""))
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else None


def describe_batch(batch: Any) -> list[str]:
    """Return a line for each part of a batch: tensors with dtype, shape, device and size, others with their type.

    Values, also those of strings and numbers, are not shown.
    """
    lines: list[str] = []
    for line in _describe(batch, "batch", 0):
        if len(lines) == _MOST_LINES:
            return [*lines, "..."]
        lines.append(line)
    return lines


def _describe(value: Any, name: str, depth: int) -> Iterator[str]:
    indent = "  " * depth + name
    if isinstance(value, Tensor):
        yield f"{indent}: {_describe_tensor(value)}"
        return
    parts = _parts(value) if depth < _DEEPEST else []
    size = f" of {len(value)}" if isinstance(value, Mapping | list | tuple | set) else ""
    yield f"{indent}: {type(value).__name__}{size}"
    for part_name, part in parts:
        yield from _describe(part, part_name, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]" if isinstance(key, str | int) else "[...]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [(f".{name}", getattr(value, name, None)) for name in value.__dataclass_fields__]
    return []


def _describe_tensor(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = format_bytes(tensor.numel() * tensor.element_size())
    try:
        shape = format_shape(tensor.shape) or "scalar"
    except RuntimeError:  # of a nested tensor
        shape = f"nested, {tensor.numel():,} elements"
    return f"{dtype} {shape} on {tensor.device}, {size}"


def advise(
    report: MemoryReport,
    stage: str = "train",
    *,
    requested: int | None = None,
    precision: str = "",
    limit: float | None = None,
    is_of_worker: bool = False,
) -> list[str]:
    """Return what to do when memory ran out, what helps most first; at least one sentence.

    Args:
        report: What the memory was used for.
        stage: "train", "validate", "sanity_check", "test" or "predict".
        requested: How many bytes were requested; None if that is unknown.
        precision: The Trainer's precision, such as "32-true".
        limit: The share of the device's memory that this process may use; None for all.
        is_of_worker: Whether it ran out in a worker process of a DataLoader.
    """
    if requested is not None and report.total is not None and requested > report.total:
        return [
            f"One tensor of {format_bytes(requested)} was requested, more than the device has "
            f"({format_bytes(report.total)}): look at the shapes in the line that failed."
        ]
    if is_of_worker:
        return [
            "A worker process of the DataLoader ran out of memory: use a smaller batch_size, num_workers or "
            "prefetch_factor, as each worker keeps prefetch_factor batches ready, or a Dataset that stores less."
        ]
    advice = [*_about_waste(report, stage, requested or 0, limit), _ABOUT_BATCHES.get(stage, _ABOUT_VALIDATION)]
    advice += _about_shares(report, stage)
    if _is_cuda(report) and precision.startswith(("32", "64")):
        advice.append(
            f'Use Trainer(precision="bf16-mixed") instead of {precision!r}: activations take half the memory.'
        )
    return advice


_LOADER = "Use a smaller batch_size in the {} loader; results that are averaged by batch size stay the same."
_ABOUT_VALIDATION = _LOADER.format("validation")
_ABOUT_BATCHES = {
    "train": "Use an n times smaller batch_size and Trainer(accumulate_grad_batches=n): the gradients are those of "
    "the large batch, except for batch norm.",
    "test": _LOADER.format("test"),
    "predict": "Use a smaller batch_size in the prediction loader. If predictions pile up, write them with a "
    "BasePredictionWriter and call predict(return_predictions=False).",
}


def _about_waste(report: MemoryReport, stage: str, requested: int, limit: float | None) -> Iterator[str]:
    """Yield what to do about memory that this step does not need."""
    if limit is not None and limit < 1:
        yield f"This process may use only {limit:.0%} of the memory: raise limit={limit:g}."
    allocated, reserved, total = report.allocated, report.reserved, report.total
    if _is_cuda(report) and reserved is not None and report.free is not None and total:
        others = total - report.free - reserved
        if others > max(_CONTEXT, _NOTABLE_SHARE * total):
            yield (
                f"Other processes hold {format_bytes(others)} of {format_bytes(total)}: end them (nvidia-smi lists "
                "them) or take another GPU."
            )
    growth = report.growth_per_epoch
    if growth and allocated and growth > 0.01 * allocated:
        yield (
            f"Memory grew by {format_bytes(growth)} per epoch: something keeps tensors, such as a list of losses. "
            "Append loss.detach() or loss.item()."
        )
    if stage != "train" and _is_large(report.in_graph, report):
        yield (
            f"Tensors of {format_bytes(report.in_graph)} belong to an autograd graph, which {stage} does not need: "
            "do not enable gradients there, and keep no outputs of training steps without .detach()."
        )
    if _is_cuda(report) and reserved is not None and allocated is not None:
        unused = reserved - allocated
        if unused > max(requested, _NOTABLE_SHARE * reserved):
            yield (
                f"{format_bytes(unused)} are reserved but not allocated, in blocks that were too small: set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts."
            )


def _about_shares(report: MemoryReport, stage: str) -> Iterator[str]:
    """Yield what to do about the kinds of tensors that take much of the memory."""
    allocated = report.allocated or 0
    states = report.found_by_kind.get("optimizer states", 0)
    if _is_large(states, report):
        yield (
            f"The optimizer's states take {format_bytes(states)} of {format_bytes(allocated)}: use an optimizer with "
            "fewer states, or shard them over GPUs with ModelParallelStrategy (FSDP2)."
        )
    activations = allocated - sum(size for kind, size in report.found_by_kind.items() if kind != "other")
    if stage == "train" and _is_large(activations, report):
        yield (
            "Memory other than weights, gradients and optimizer states, mostly activations, takes "
            f"{format_bytes(activations)}: recompute activations with torch.utils.checkpoint (activation "
            "checkpointing)."
        )


def _is_large(size: int, report: MemoryReport) -> bool:
    whole = max(report.allocated or 0, 0 if _is_cuda(report) else report.reserved or 0)
    return whole > 0 and size > _LARGE_SHARE * whole


def _is_cuda(report: MemoryReport) -> bool:
    return report.device.startswith("cuda")


def out_of_memory_text(
    error: BaseException,
    circumstances: Sequence[str],
    batch: Sequence[str],
    report: MemoryReport,
    advice: Sequence[str],
) -> str:
    """Return the text of the file: what ran, the batch, the advice, the sizes with the largest tensors, the error."""
    sections = {
        "What ran": circumstances,
        "The batch": batch or ["(none: no step was running)"],
        "What to do": [f"- {sentence}" for sentence in advice],
        "Memory": str(report).splitlines(),
        "The error": [describe_error(error)],
    }
    return "\n".join("\n".join((title, "-" * len(title), *lines, "")) for title, lines in sections.items())
