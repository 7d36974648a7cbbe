"""What was measured on one rank of a run, and a table of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks.devices.core.quantities import quantity_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_JOULES_IN_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """What `DeviceMonitor` measured on one rank.

    Attributes:
        rank: The global rank.
        node: The rank of its machine.
        stage: The stage that the values are of: "train", "val", "test" or "predict".
        products: Name of a GPU, such as "gpu0" -> its product's name.
        means: Key, such as "gpu0/utilization" -> the mean of its values.
        maxima: Key -> the largest of its values.
        energy: Name of a GPU -> the energy of the whole run in kWh.
        verdict: What the run waited for, and what to try, in sentences.
    """

    rank: int
    node: int
    stage: str
    products: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[str, float] = field(default_factory=dict)
    verdict: Sequence[str] = ()


def joules_to_kwh(joules: float) -> float:
    """Return an energy in kWh."""
    return joules / _JOULES_IN_KWH


def device_use(summary: DeviceSummary) -> DeviceUse:
    """Return what one rank's devices did, as texts for a report."""
    rows = [(device, name.replace("_", " "), mean, most) for device, name, mean, most in _rows(summary)]
    energy = [(name, "energy", f"{used:.3g} kWh", "") for name, used in summary.energy.items()]
    wait = summary.means.get("host/data_wait")
    return DeviceUse(rank=summary.rank, data_wait=wait, rows=[*rows, *energy], verdict=list(summary.verdict))


def device_report(ranks: Sequence[DeviceSummary]) -> Group:
    """Return, for rich, a table of mean and maximum of each key in a fit, and below it the energy and the verdicts."""
    from rich.console import Group
    from rich.text import Text

    return Group(_table(ranks), Text("\n".join(_sentences(ranks))))


def _table(ranks: Sequence[DeviceSummary]) -> Table:
    from rich.table import Table

    several = len(ranks) > 1
    table = Table(title="Devices in training")
    for name in (*["rank"] * several, "device", "quantity"):
        table.add_column(name)
    for name in ("mean", "max"):
        table.add_column(name, justify="right")
    for summary in ranks:
        before = ""
        for device, *cells in _rows(summary):
            labels = [str(summary.rank)] * several + [device]
            if device == before:
                labels = [""] * len(labels)
            elif before:
                table.add_section()
            before = device
            table.add_row(*labels, *cells)
        table.add_section()
    return table


def _rows(summary: DeviceSummary) -> Iterator[tuple[str, str, str, str]]:
    """Yield device, quantity, mean and maximum of each key."""
    for key, mean in summary.means.items():
        device, _, name = key.partition("/")
        label = f"{device} {summary.products.get(device, '')}".rstrip()
        yield label, name, _with_unit(mean, key), _with_unit(summary.maxima[key], key)


def _with_unit(value: float, key: str) -> str:
    unit = quantity_of(key).unit
    return f"{value:.1f} {unit}" if unit == "GiB" else f"{value:.0f} {unit}"


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
