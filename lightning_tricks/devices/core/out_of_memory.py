"""Errors that say that memory ran out, what to do about it, and the text of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._shared.text import describe_error, format_shape
from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.memory_report import MemoryReport

_OF_DEVICE = re.compile(
    r"(^|: )(CUDA|HIP|XPU|MPS backend) out of memory|(CUDA|HIP)( driver)? error: out of memory"
    r"|\b(CU|HIP)[A-Z_]*_ALLOC_FAILED\b|Cuda failure (\d+ )?'out of memory'",  # of libraries, and of NCCL
    re.MULTILINE,
)
_OF_HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Caught MemoryError in DataLoader worker"  # of NumPy, which torch cannot raise again as what it was
)
_REQUESTED = re.compile(r"(?i)(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)")
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
_MOST_LINES = 40
_DEEPEST = 5
_LARGE_SHARE = 0.25  # of what is allocated
_NOTABLE_SHARE = 0.1  # of the device's memory
_CONTEXT = 2**30  # bytes: CUDA contexts and libraries take less


def memory_that_ran_out(error: BaseException) -> Literal["device", "host", ""]:
    """Return whose memory an error says that has run out; "" for any other error.

    An error that was raised from such an error counts as well, as compilers raise it.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, MemoryError):
            return "host"
        if isinstance(cause, RuntimeError):
            text = str(cause)
            if _OF_HOST.search(text):
                return "host"
            if isinstance(cause, torch.OutOfMemoryError) or _OF_DEVICE.search(text):
                return "device"
        cause = cause.__cause__
    return ""


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


@dataclass(frozen=True)
class OutOfMemory:
    """The circumstances in which memory ran out.

    Attributes:
        report: What the memory was used for.
        stage: "train", "validate", "sanity_check", "test" or "predict".
        requested: How many bytes were requested; None if that is unknown.
        precision: The Trainer's precision, such as "32-true".
        limit: The share of the device's memory that this process may use; None for all.
        is_of_worker: Whether it ran out in a worker process of a DataLoader.
    """

    report: MemoryReport
    stage: str = "train"
    requested: int | None = None
    precision: str = ""
    limit: float | None = None
    is_of_worker: bool = False


def advise(facts: OutOfMemory) -> list[str]:
    """Return what to do, what helps most first; at least one sentence."""
    report = facts.report
    total = report.total
    if facts.requested is not None and total is not None and facts.requested > total:
        return [
            f"One tensor of {format_bytes(facts.requested)} was requested, more than all memory "
            f"({format_bytes(total)}): look at the shapes in the line that failed."
        ]
    if facts.is_of_worker:
        return [
            "A worker process of the DataLoader ran out of memory: use a smaller batch_size, num_workers or "
            "prefetch_factor, as each worker keeps prefetch_factor batches ready, or a Dataset that holds less."
        ]
    advice = [*_about_others(facts), *_about_leaks(facts), *_about_fragments(facts), *_about_batches(facts)]
    return [*advice, *_about_shares(facts), *_about_precision(facts)]


def _about_others(facts: OutOfMemory) -> list[str]:
    report, advice = facts.report, []
    if facts.limit is not None and facts.limit < 1:
        advice.append(f"This process may use only {facts.limit:.0%} of the memory: raise limit={facts.limit:g}.")
    others = _held_by_others(report)
    if others is not None and report.total and others > max(_CONTEXT, _NOTABLE_SHARE * report.total):
        advice.append(
            f"Other processes hold {format_bytes(others)} of {format_bytes(report.total)}: end them (nvidia-smi lists "
            "them) or take another GPU."
        )
    return advice


def _held_by_others(report: MemoryReport) -> int | None:
    if report.total is None or report.free is None or report.reserved is None or not _is_cuda(report):
        return None
    return report.total - report.free - report.reserved


def _about_leaks(facts: OutOfMemory) -> list[str]:
    report, advice = facts.report, []
    growth = report.growth_per_epoch
    if growth and report.allocated and growth > 0.01 * report.allocated:
        advice.append(
            f"Memory grew by {format_bytes(growth)} per epoch: something keeps tensors, such as a list of losses. "
            "Append loss.detach() or loss.item()."
        )
    if facts.stage != "train" and _is_large(report.in_graph, report):
        advice.append(
            f"Tensors of {format_bytes(report.in_graph)} belong to a graph of autograd, which {facts.stage} does not "
            "need: do not enable gradients there, and keep no outputs of training steps without .detach()."
        )
    return advice


def _about_fragments(facts: OutOfMemory) -> list[str]:
    report = facts.report
    if not _is_cuda(report) or report.reserved is None or report.allocated is None:
        return []
    unused = report.reserved - report.allocated
    if unused <= max(facts.requested or 0, _NOTABLE_SHARE * report.reserved):
        return []
    return [
        f"{format_bytes(unused)} are reserved but not allocated, in blocks that were too small: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts."
    ]


def _about_batches(facts: OutOfMemory) -> list[str]:
    if facts.stage == "train":
        return [
            "Use a smaller batch_size and Trainer(accumulate_grad_batches=n), n times as small: the gradients are "
            "those of the large batch, except for batch norm."
        ]
    if facts.stage == "predict":
        return [
            "Use a smaller batch_size in the prediction loader. If predictions pile up, write them with a "
            "BasePredictionWriter and call predict(return_predictions=False)."
        ]
    loader = "test" if facts.stage == "test" else "validation"
    return [f"Use a smaller batch_size in the {loader} loader; results that are averaged by batch size stay the same."]


def _about_shares(facts: OutOfMemory) -> list[str]:
    report, advice = facts.report, []
    states = report.found_by_kind.get("optimizer states", 0)
    if _is_large(states, report):
        advice.append(
            f"The optimizer's states hold {format_bytes(states)} of {format_bytes(report.allocated or 0)}: use an "
            "optimizer with fewer states, or shard them over GPUs with ModelParallelStrategy (FSDP2)."
        )
    kept = sum(size for kind, size in report.found_by_kind.items() if kind != "other")
    activations = (report.allocated or 0) - kept
    if facts.stage == "train" and _is_large(activations, report):
        advice.append(
            f"What is neither weights, gradients nor optimizer states, activations above all, holds "
            f"{format_bytes(activations)}: recompute activations with torch.utils.checkpoint (activation "
            "checkpointing)."
        )
    return advice


def _about_precision(facts: OutOfMemory) -> list[str]:
    if not _is_cuda(facts.report) or not facts.precision.startswith(("32", "64")):
        return []
    return [f'Use Trainer(precision="bf16-mixed") instead of {facts.precision!r}: activations take half the memory.']


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
