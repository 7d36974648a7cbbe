"""`EvaluationPlots`: plots of the last evaluations for the loggers, and parts of them for a run report."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_tricks._shared.pictures import log_image
from lightning_tricks._shared.report_parts import ReportPart
from lightning_tricks.metrics.core.history import EpochRecord, EvaluationData, History, make_parts
from lightning_tricks.metrics.core.logged_keys import LoggedKeys
from lightning_tricks.metrics.core.plots import as_array, make_figures
from lightning_tricks.metrics.core.suite import MetricSuite


class EvaluationPlots:
    """The data of the last evaluation of each dataloader.

    Args:
        history: The values of the run.
        keys: The keys under which they are logged.
        class_names: The names of the classes.
        every_n_epochs: After which epochs of a fit to plot as well as at its end; 0 for none of them.
        are_logged: Whether plots are sent to the loggers, not only to a run report.
    """

    def __init__(
        self, history: History, keys: LoggedKeys, class_names: Sequence[str], every_n_epochs: int, *, are_logged: bool
    ) -> None:
        self._history, self._keys, self._class_names = history, keys, class_names
        self._every_n_epochs, self._are_logged = every_n_epochs, are_logged
        self._to_log: dict[str, EvaluationData] = {}  # that were not plotted yet, by prefix
        self._to_report: dict[str, EvaluationData] = {}

    def add(self, trainer: Trainer, record: EpochRecord, suite: MetricSuite) -> None:
        """Keep the data of an evaluation in place of those before; plot them now in every n-th epoch, or outside a fit.

        It reads from the device.
        """
        kind = suite.task.kind if suite.task is not None else ""
        data = EvaluationData(record, kind, suite.confusion_matrix(), suite.score_histogram())
        self._to_report[record.prefix] = data
        if self._are_logged:
            self._to_log[record.prefix] = data
            every = self._every_n_epochs
            if not record.fit or (every and (trainer.current_epoch + 1) % every == 0):
                self.log(trainer)

    def log(self, trainer: Trainer) -> None:
        """Plot the evaluations that were not plotted yet, and send the images to the loggers."""
        pending, self._to_log = self._to_log, {}
        self._history.records()  # reads the values of the records from the device
        for prefix, data in pending.items():
            try:
                figures = make_figures(data, tuple(self._class_names))
            except ModuleNotFoundError as error:
                rank_zero_info(f"MetricsMonitor logs no plots: {error}")
                return
            for name, figure in figures.items():
                log_image(trainer.loggers, self._keys.key(prefix, name), as_array(figure), data.record.step)

    def report_parts(self) -> list[ReportPart]:
        """Return confusion matrix, reliability and single classes of the last evaluation."""
        self._history.records()  # reads the values of the records from the device
        return [
            part for data in self._to_report.values() for part in make_parts(data, self._class_names, self._keys.key)
        ]
