"""What to do when memory has run out, chosen by what it was used for."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_tricks._shared.units import format_bytes
from lightning_tricks.devices.core.memory_report import MemoryReport

_LARGE_SHARE = 0.25  # of what is allocated
_NOTABLE_SHARE = 0.1  # of the device's memory
_CONTEXT = 2**30  # bytes: CUDA contexts and libraries take less


@dataclass(frozen=True)
class OutOfMemory:
    """The circumstances in which memory ran out.

    Attributes:
        report: What the memory was used for.
        stage: "train", "validate", "sanity_check", "test" or "predict".
        requested: How many bytes were asked for; None if that is unknown.
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
            f"One tensor of {format_bytes(facts.requested)} was asked for, more than all memory "
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
