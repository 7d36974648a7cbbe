"""`PendingPlots`: what is plotted for the loggers at the end of a run, or of some epochs."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_tricks._shared.logger_images import log_image
from lightning_tricks.metrics.core.history import EpochRecord, History
from lightning_tricks.metrics.core.logged_keys import LoggedKeys
from lightning_tricks.metrics.core.plots import PlotData, as_array, make_figures
from lightning_tricks.metrics.core.suite import MetricSuite


def plot_data(record: EpochRecord, suite: MetricSuite) -> PlotData:
    """Return the data of an epoch that pictures are made of; it reads from the device."""
    kind = suite.task.kind if suite.task is not None else ""
    return PlotData(record, kind, suite.confusion_matrix(), suite.score_histogram())


class PendingPlots:
    """The last data of each dataloader that were not plotted yet."""

    def __init__(self) -> None:
        self._data: dict[str, PlotData] = {}

    def add(self, data: PlotData) -> None:
        """Keep the data of an epoch, in place of those of the epoch before it."""
        self._data[data.record.prefix] = data

    def log(self, trainer: Trainer, history: History, keys: LoggedKeys, class_names: Sequence[str]) -> None:
        """Plot the data and send the images to the loggers."""
        pending, self._data = self._data, {}
        history.records()  # reads the values of the records from the device
        for prefix, data in pending.items():
            try:
                figures = make_figures(data, tuple(class_names))
            except ModuleNotFoundError as error:
                rank_zero_info(f"MetricsMonitor logs no plots: {error}")
                return
            for name, figure in figures.items():
                log_image(trainer.loggers, keys.key(prefix, name), as_array(figure), data.record.step)
