"""The measurements of `DeviceMonitor` while a Trainer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from lightning_tricks._lightning_compat.flavor import Trainer
from lightning_tricks._lightning_compat.observers import observe_fetches, observe_iterators
from lightning_tricks.devices.core.bottleneck import (
    DataWait,
    IdleClock,
    WaitTotals,
    find_remedy,
    judge_gpu,
    judge_wait,
    waits_for_data,
)
from lightning_tricks.devices.core.device_summary import GIB, DeviceSummary, Recorder, generic_key, quantity_of
from lightning_tricks.devices.core.nvml import NvmlUnavailableError, open_nvml
from lightning_tricks.devices.core.utilization import (
    BackgroundSampler,
    GpuUtilization,
    HostUtilization,
    available_cores,
    find_cuda_handles,
)

_JOULES_IN_KWH = 3.6e6


class MonitoredRun:
    """Measures the devices of one rank in the background, from the moment at which it is made until `close`.

    Args:
        trainer: The Trainer, whose devices are known already.
        keys: The quantities.
        interval: The seconds between two measurements.
        warn_temperature: The temperature in degrees Celsius that is an alert; None for none.

    Attributes:
        wait: Measures how long the run waits for data.
        alerts: Warnings that are still to be given, about this rank's own GPU.

    Raises:
        ModuleNotFoundError: If a package of the extra is missing.
    """

    def __init__(self, trainer: Trainer, keys: Sequence[str], interval: float, warn_temperature: float | None) -> None:
        self.alerts: deque[str] = deque()
        self._told: set[str] = set()  # kinds of alerts that were given
        self._keys = keys
        self._warn_temperature = warn_temperature
        self._recorder = Recorder()
        self._latest: dict[str, float] = {}
        self._own = cuda_device_of(trainer)
        self._own_name = "" if self._own is None else f"gpu{self._own.index}"
        self._host = HostUtilization()
        self.wait = DataWait(None if self._own is None else IdleClock(self._own))
        with ExitStack() as nvml, ExitStack() as stack:
            self._gpus = self._open_gpus(trainer, nvml)
            wait = self.wait
            stack.enter_context(observe_fetches(trainer, wait.fetch_started, wait.fetch_ended, "DeviceMonitor"))
            made = partial(wait.fetch_ended, is_batch=False)
            stack.enter_context(observe_iterators(trainer, wait.fetch_started, made, "DeviceMonitor"))
            self.sample()  # so that utilization is that of the run
            self._sampler = BackgroundSampler(self.sample, interval, finish=nvml.pop_all().close)
            self._sampler.start()
            stack.callback(self._sampler.stop)
            self._installed = stack.pop_all()

    def close(self) -> None:
        """Stop measuring, and end the thread."""
        self._installed.close()

    def sample(self) -> None:
        """Measure the load of all devices once; the values belong to the stage that runs. It does not raise."""
        values: dict[str, float] = {}
        for measure in (self._host.measure, *(gpu.measure for gpu in self._gpus)):
            try:
                values |= measure()
            except Exception as error:  # such as too many open files: it may work the next time
                self._tell_once(
                    "failure", f"DeviceMonitor could not measure everything, and leaves out the rest: {error!r}."
                )
        for gpu in self._gpus:
            if gpu.name == self._own_name:
                self._alert(gpu, values.get(f"{gpu.name}/temperature"))
        self._latest = values
        stage = self.wait.stage
        if stage is not None:
            self._recorder.add(stage, values)

    def _tell_once(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.alerts.append(sentence)

    def take(self, stage: str) -> dict[str, float]:
        """Return the values of a stage to log now: each key's mean or maximum since this was last called."""
        self._recorder.add(stage, self._own_values(stage))
        recent = self._recorder.take_recent(stage)
        logged = {
            key: statistics.mean if quantity_of(key).logged == "mean" else statistics.maximum
            for key, statistics in recent.items()
        }
        return {key: value for key, value in (self._latest | logged).items() if generic_key(key) in self._keys}

    def summarize(self, trainer: Trainer, stage: str, loaders: Sequence[Any]) -> DeviceSummary:
        """Stop the thread, and return a summary of all that was measured in a stage."""
        self._sampler.stop()  # after a last measurement, for the energy
        self.take(stage)
        means, maxima = dict(self._latest), dict(self._latest)
        for key, statistics in self._recorder.whole(stage).items():
            means[key], maxima[key] = statistics.mean, statistics.maximum
        wait = self.wait.totals[stage]
        cores = max(1, available_cores() // trainer.num_devices)
        for device, seconds in (("host", wait.waited), (self._own_name, wait.idle)):
            if seconds is not None and wait.seconds > 0:
                means[f"{device}/data_wait"] = 100 * seconds / wait.seconds  # exact, as intervals are unequal
        gpus = [gpu for gpu in self._gpus if trainer.world_size == 1 or gpu.name == self._own_name]
        of_others = {gpu.name for gpu in self._gpus if gpu not in gpus}  # whose own ranks report them
        chosen = [key for key in means if generic_key(key) in self._keys and key.partition("/")[0] not in of_others]
        chosen.sort(key=lambda key: (key.partition("/")[0], self._keys.index(generic_key(key))))
        facts = wait, loaders, cores, means.get("host/cpu_utilization")
        sentences, remedy = judge_wait(*facts), find_remedy(*facts)
        return DeviceSummary(
            rank=trainer.global_rank,
            node=trainer.node_rank,
            stage=stage,
            products={gpu.name: gpu.product for gpu in gpus if gpu.product},
            means={key: means[key] for key in chosen},
            maxima={key: maxima[key] for key in chosen},
            energy={gpu.name: gpu.energy / _JOULES_IN_KWH for gpu in gpus if gpu.energy is not None},
            verdict=[*sentences, *self._judge(gpus, wait, means)],
            keeps_up=not remedy if sentences else None,
            remedy=remedy,
        )

    def _own_values(self, stage: str) -> dict[str, float]:
        """Return the values that only this process knows: its waiting, and the memory of its tensors."""
        shares = self.wait.take(stage)
        values = {"host/data_wait": shares["waited"]} if shares else {}
        if self._own is None:
            return values
        if "idle" in shares:
            values[f"{self._own_name}/data_wait"] = shares["idle"]
        return values | {f"{self._own_name}/peak_memory_gib": torch.cuda.max_memory_allocated(self._own) / GIB}

    def _open_gpus(self, trainer: Trainer, stack: ExitStack) -> list[GpuUtilization]:
        """Return the GPUs of the Trainer on this machine for rank zero, which logs, and the own one of other ranks."""
        if self._own is None:
            return []
        try:
            nvml = stack.enter_context(open_nvml())
        except NvmlUnavailableError as error:
            self.alerts.append(f"DeviceMonitor measures no GPU: {error}")
            return []
        indices = trainer.device_ids if trainer.is_global_zero else [self._own.index]
        handles = find_cuda_handles(nvml, indices)
        if missing := [f"gpu{index}" for index in indices if index not in handles]:
            self.alerts.append(f"DeviceMonitor does not measure {', '.join(missing)}: NVML reports nothing about it.")
        return [GpuUtilization(nvml, handle, f"gpu{index}") for index, handle in handles.items()]

    def _alert(self, gpu: GpuUtilization, temperature: float | None) -> None:
        limit = self._warn_temperature
        if gpu.problem is not None:
            self._tell_once("problem", f"DeviceMonitor: {gpu.name} no longer responds ({gpu.problem}).")
        if temperature is not None and limit is not None and temperature >= limit:
            self._tell_once(
                "heat",
                f"DeviceMonitor: {gpu.name} is at {temperature:.0f} °C, and warn_temperature={limit:g}. At about 85 to "
                "95 °C, GPUs slow down by themselves: check its fan and the airflow.",
            )

    def _judge(self, gpus: Sequence[GpuUtilization], wait: WaitTotals, means: Mapping[str, float]) -> list[str]:
        sentences = []
        for gpu in gpus:
            utilization = means.get(f"{gpu.name}/utilization")
            sentences += judge_gpu(gpu.name, utilization, gpu.reasons, gpu.n_measurements, not waits_for_data(wait))
        if not self._sampler.stop():
            sentences.append("The measurements ended early: the driver does not answer.")
        elif self._sampler.error is not None:
            sentences.append(f"The measurements ended early: {self._sampler.error!r}.")
        return sentences


def cuda_device_of(trainer: Trainer) -> torch.device | None:
    """Return the CUDA device of this rank, or None if it trains on something else."""
    device = trainer.strategy.root_device
    return device if device.type == "cuda" else None
