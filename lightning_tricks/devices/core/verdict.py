"""Say in sentences what a run waited for, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tricks.devices.core.data_wait import WaitTotals

_BOTTLENECK = 0.1  # the share of the time from which waiting is worth a remedy
_FEWEST_BATCHES = 10  # below, a share of the time says nothing
_BUSY = 50  # percent of utilization
_HAND_OVER = 1e-3  # seconds: about what it takes to send a batch from a worker process


@dataclass(frozen=True)
class LoaderSettings:
    """The arguments of a DataLoader that decide how fast it is.

    Attributes:
        num_workers: Its number of worker processes.
        persistent_workers: Whether they live on between epochs.
    """

    num_workers: int
    persistent_workers: bool


def loader_settings(loaders: Sequence[Any]) -> LoaderSettings | None:
    """Return the settings of the only loader, or None if there are several, or it is no DataLoader."""
    if len(loaders) != 1 or not isinstance(num_workers := getattr(loaders[0], "num_workers", None), int):
        return None
    return LoaderSettings(num_workers, bool(getattr(loaders[0], "persistent_workers", False)))


def judge_wait(
    wait: WaitTotals, loader: LoaderSettings | None, cores: int, cpu_utilization: float | None = None
) -> str:
    """Say which share of the time a stage waited for data, and what to try if that is much.

    With a GPU it is the time in which the GPU had nothing to do meanwhile.

    Args:
        wait: What was measured.
        loader: The settings of the loader, if they are known.
        cores: The cores that the workers of this rank may use.
        cpu_utilization: The mean utilization of all cores, in percent, if it is known.

    Returns:
        A sentence; "" if there were too few batches.
    """
    if wait.n_batches < _FEWEST_BATCHES or wait.seconds <= 0:
        return ""
    share = _percent(wait.lost / wait.seconds)
    if waits_for_data(wait):
        said = f"Waited for data {share} of the time: the loader is the bottleneck"
        return f"{said}; {_remedy(wait, loader, cores, cpu_utilization)}."
    if wait.idle is not None and wait.waited >= _BOTTLENECK * wait.seconds:
        return (
            f"The host waited for data {_percent(wait.waited / wait.seconds)} of the time, and the GPU had work "
            "meanwhile: the loader keeps up."
        )
    return f"Waited for data {share} of the time: the loader keeps up."


def waits_for_data(wait: WaitTotals) -> bool:
    """Whether so much of the time is lost in waiting for data that it is worth a remedy."""
    return wait.n_batches >= _FEWEST_BATCHES and wait.lost > 0 and wait.lost >= _BOTTLENECK * wait.seconds


def _remedy(wait: WaitTotals, loader: LoaderSettings | None, cores: int, cpu_utilization: float | None) -> str:
    if loader is None:
        return "load in worker processes, or make loading cheaper"
    if wait.waited_first > wait.waited / 2 and loader.num_workers and not loader.persistent_workers:
        return "most of it was at the start of epochs, where the workers start anew; try persistent_workers=True"
    per_batch = wait.waited / wait.n_batches
    if loader.num_workers == 0 and per_batch < _HAND_OVER:
        return (
            f"loading a batch takes only {1000 * per_batch:.2g} ms, which worker processes would not make faster; use "
            "larger batches, or take each batch out of tensors in memory at once"
        )
    needed = num_workers_needed(wait, loader)
    if loader.num_workers >= cores:
        if cpu_utilization is not None and cpu_utilization < _BUSY:  # it computes little: more can wait at once
            return (
                f"try num_workers={needed}, now {loader.num_workers}: the CPU is not busy, so the workers wait for a "
                "disk or a network"
            )
        return (
            f"{loader.num_workers} workers on {_count(cores)} are not enough, so make loading cheaper: decoded, "
            "smaller or cached data, fewer augmentations"
        )
    more = "" if needed <= cores else f" ({needed} would keep up, on {_count(cores)}: make loading cheaper, too)"
    return f"try num_workers={min(needed, cores)}, now {loader.num_workers}{more}"


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"


def num_workers_needed(wait: WaitTotals, loader: LoaderSettings) -> int:
    """Return how many workers load batches as fast as they are trained on.

    Without workers a batch takes the time that was waited for it. With n of them, which were always behind, n batches
    were loaded in the time of one step and its wait each.
    """
    working = max(wait.seconds - wait.lost, 1e-9)
    loading = loader.num_workers * wait.seconds if loader.num_workers else wait.waited
    return max(loader.num_workers + 1, math.ceil(loading / working))


def judge_gpu(
    name: str, utilization: float | None, reasons: Mapping[str, int], n_measurements: int, has_data: bool
) -> list[str]:
    """Say if a GPU was idle for another reason than data, and if it was slowed down.

    Args:
        name: What it is called, such as "gpu0".
        utilization: The mean of its utilization, in percent, if it is known.
        reasons: How often it was slowed down for a reason.
        n_measurements: How often that was measured.
        has_data: Whether it does not wait for data.

    Returns:
        Sentences; none if there is nothing to say.
    """
    sentences = []
    if utilization is not None and utilization < _BUSY and has_data:
        sentences.append(
            f"{name} worked {_percent(utilization / 100)} of the time although data were there: the host starts "
            "kernels too slowly, or something else runs between the steps; try larger batches or torch.compile."
        )
    shares = {reason: count / n_measurements for reason, count in reasons.items()}
    often = [f"{reason} {_percent(share)}" for reason, share in shares.items() if share >= _BOTTLENECK]
    if often:
        sentences.append(f"{name} ran below its clock rate: {', '.join(often)} of the time.")
    return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
