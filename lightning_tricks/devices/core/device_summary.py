"""What is measured on each rank of a run, how its values are gathered, and a table of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.report_parts import DeviceUse

if TYPE_CHECKING:
    from rich.console import Group

GIB = 2**30


@dataclass(frozen=True)
class Quantity:
    """One quantity that is measured again and again.

    Attributes:
        words: Its name, for people, who read the unit beside the value.
        unit: Its unit, for people.
        logged: What of the values since the last log is logged: their mean, or the largest.
        field: The field of `Gpu` that tells it; empty for others.
        divisor: What the field's value is divided by.
        decimals: The digits behind the point that people are shown.
        is_default: Whether it is summarized unless others are named.
        is_logged: Whether it is logged unless others are named.
    """

    words: str
    unit: str
    logged: Literal["mean", "max"]
    field: str = ""
    divisor: int = 1
    decimals: int = 0
    is_default: bool = False
    is_logged: bool = False


QUANTITIES: Mapping[str, Quantity] = {
    "gpu/utilization": Quantity("utilization", "%", "mean", "utilization", is_default=True, is_logged=True),
    "gpu/memory_used_gib": Quantity(
        "memory used", "GiB", "max", "memory_used", GIB, 1, is_default=True, is_logged=True
    ),
    "gpu/peak_memory_gib": Quantity("peak memory", "GiB", "max", decimals=1, is_default=True),
    "gpu/temperature": Quantity("temperature", "°C", "max", "temperature", is_default=True),
    "gpu/power_w": Quantity("power", "W", "mean", "power", is_default=True),
    "gpu/data_wait": Quantity("data wait", "%", "mean"),
    "gpu/throttled": Quantity("throttled", "%", "mean"),
    "gpu/memory_utilization": Quantity("memory utilization", "%", "mean", "memory_utilization"),
    "gpu/sm_clock_mhz": Quantity("SM clock", "MHz", "mean", "sm_clock"),
    "gpu/fan": Quantity("fan", "%", "max", "fan"),
    "host/cpu_utilization": Quantity("CPU utilization", "%", "mean", is_default=True, is_logged=True),
    "host/ram_used_gib": Quantity("RAM used", "GiB", "max", decimals=1, is_default=True),
    "host/data_wait": Quantity("data wait", "%", "mean", is_default=True, is_logged=True),
    "host/process_ram_gib": Quantity("process RAM", "GiB", "max", decimals=1),
}
DEFAULT_KEYS = tuple(key for key, quantity in QUANTITIES.items() if quantity.is_default)
LOGGED_KEYS = tuple(key for key, quantity in QUANTITIES.items() if quantity.is_logged)


def check_keys(keys: object) -> tuple[str, ...]:
    """Return the names of the quantities that "default" or a list of names stands for.

    Raises:
        TypeError: If it is neither.
        ValueError: If a name is unknown; the message has the most similar one.
    """
    if keys == "default":
        return DEFAULT_KEYS
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(f"keys must be 'default' or a list of {', '.join(QUANTITIES)}, got {keys!r}.")
    return tuple(check_choice("keys", key, QUANTITIES) for key in keys)


@dataclass
class Statistics:
    """The mean and the largest of some values."""

    count: int = 0
    total: float = 0.0
    maximum: float = float("-inf")

    def add(self, value: float) -> None:
        """Include a value."""
        self.count += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    @property
    def mean(self) -> float:
        """The mean of the values; there has to be one."""
        return self.total / self.count


class Recorder:
    """Gathers values by key, for a whole stage and since they were last taken; several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, dict[str, Statistics]] = {}
        self._recent: dict[str, dict[str, Statistics]] = {}

    def add(self, stage: str, values: Mapping[str, float]) -> None:
        """Include values of a stage."""
        with self._lock:
            for gathered in (self._stages, self._recent):
                of_stage = gathered.setdefault(stage, {})
                for key, value in values.items():
                    of_stage.setdefault(key, Statistics()).add(value)

    def take_recent(self, stage: str) -> dict[str, Statistics]:
        """Return what was added to a stage since this was last called, by key."""
        with self._lock:
            return self._recent.pop(stage, {})

    def whole(self, stage: str) -> dict[str, Statistics]:
        """Return what was added to a stage, by key."""
        with self._lock:
            return {key: Statistics(*vars(value).values()) for key, value in self._stages.get(stage, {}).items()}


def generic_key(key: str) -> str:
    """Return the name of the quantity that a logged key is about: "gpu/power_w" for "gpu3/power_w"."""
    device, _, name = key.partition("/")
    return f"{device.rstrip('0123456789')}/{name}"


def quantity_of(key: str) -> Quantity:
    """Return the quantity that a logged key is about."""
    return QUANTITIES[generic_key(key)]


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """The measurements of `DeviceMonitor` on one rank.

    Attributes:
        rank: The global rank.
        node: The rank of its node.
        stage: The stage of the values: "train", "val", "test" or "predict".
        products: Name of a GPU, such as "gpu0" -> its product's name.
        means: Key, such as "gpu0/utilization" -> the mean of its values.
        maxima: Key -> the largest of its values.
        energy: Name of a GPU -> the energy of the whole run in kWh.
        verdict: Sentences about the bottleneck, and what to try.
        keeps_up: Whether the loader keeps up with the device, although the host may wait; None if it is unknown.
        remedy: What would make loading faster, in words, or "".
    """

    rank: int
    node: int
    stage: str
    products: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)
    verdict: Sequence[str] = ()
    keeps_up: bool | None = None
    remedy: str = ""


def device_use(summary: DeviceSummary) -> DeviceUse:
    """Return what one rank's devices did, as texts for a report."""
    rows = [(device, quantity.words, mean, most) for device, quantity, _, mean, most in _rows(summary)]
    energy = [(name, "energy", f"{used:.3g} kWh", "") for name, used in summary.energy.items()]
    return DeviceUse(
        rank=summary.rank,
        data_wait=summary.means.get("host/data_wait"),
        rows=[*rows, *energy],
        verdict=list(summary.verdict),
        keeps_up=summary.keeps_up,
        remedy=summary.remedy,
    )


def device_report(ranks: Sequence[DeviceSummary]) -> Group:
    """Return, for rich, a table of mean and maximum of each key in a fit, and below it the energy and the verdicts."""
    from rich.console import Group
    from rich.text import Text

    from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

    several = len(ranks) > 1
    table = FittingTable(drop=["max"], title="Devices in training")
    for name in (*["rank"] * several, "device", "quantity"):
        table.add_column(name)
    for name in ("mean", "max"):
        table.add_column(name, justify="right")
    for summary in ranks:
        before = ""
        for device, _, name, *numbers in _rows(summary):
            labels = [str(summary.rank)] * several + [device]
            if device == before:
                labels = [""] * len(labels)
            elif before:
                table.add_section()
            before = device
            table.add_row(*labels, FoldedName(name), *numbers)
        table.add_section()
    return Group(table, Text("\n".join(_sentences(ranks))))


def describe_devices(ranks: Sequence[DeviceSummary]) -> str:
    """Return waits, energy and verdicts in one line; of many ranks, the first verdicts and how many there are."""
    waits = [summary.means["host/data_wait"] for summary in ranks if "host/data_wait" in summary.means]
    sentences = _sentences(ranks) or [f"Waited for data {wait:.0f} % of the time." for wait in waits[:1]]
    if len(ranks) > 1 and len(sentences) > 3:
        sentences[2:] = [f"{len(sentences) - 2} more sentences are in `summary`."]
    return " ".join(sentences)


def _rows(summary: DeviceSummary) -> Iterator[tuple[str, Quantity, str, str, str]]:
    """Yield device, quantity, its name, mean and maximum of each key."""
    for key, mean in summary.means.items():
        device, _, name = key.partition("/")
        label = f"{device} {summary.products.get(device, '')}".rstrip()
        quantity = quantity_of(key)
        yield label, quantity, name, _with_unit(mean, quantity), _with_unit(summary.maxima[key], quantity)


def _with_unit(value: float, quantity: Quantity) -> str:
    return f"{value:.{quantity.decimals}f} {quantity.unit}"


def _sentences(ranks: Sequence[DeviceSummary]) -> list[str]:
    sentences = []
    energy = {(summary.node, name): used for summary in ranks for name, used in summary.energy.items()}
    if energy:
        gpus = f"{len(energy)} GPUs" if len(energy) > 1 else "the GPU"
        sentences.append(f"Energy of {gpus}: {sum(energy.values()):.3g} kWh.")
    for summary in ranks:
        rank = f"Rank {summary.rank}: " if len(ranks) > 1 else ""
        sentences += [rank + said for said in summary.verdict]
    return sentences
