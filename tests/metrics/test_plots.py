import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import ImageLogger, MetricsMonitor
from lightning_tricks._shared.pictures import can_log_images, log_image
from lightning_tricks.metrics import binary_metrics, multiclass_metrics, multilabel_metrics, regression_metrics
from lightning_tricks.metrics.core.plots import as_array, classes_figure, confusion_figure, curves_figure
from tests.metrics.tables import OneLoader, loader_of, table
from tests.small import QUIET, cases, without_warnings

# Lightning's advice on its logging interval
pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")


def names_of(folder):
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.png"))


def fit(monitor, logger, columns, epochs=3):
    fitter = Trainer(callbacks=[monitor], **{**QUIET, "max_epochs": epochs, "logger": logger})
    fitter.fit(OneLoader(), loader_of(*columns), loader_of(*columns))
    return fitter


def test_png_files_lie_beside_a_csv_logger_at_the_end(tmp_path):
    monitor = MetricsMonitor(multiclass_metrics(4), class_names=["ant", "bee", "cat", "dog"])
    fitter = fit(monitor, CSVLogger(tmp_path, name="run"), table(20)[:2])
    folder = tmp_path / "run/version_0/pictures"
    assert names_of(folder) == [f"val/{name}_000015" for name in ("classes", "confusion_matrix", "curves")]
    fitter.test(OneLoader(), loader_of(*table(9)[:2]), verbose=False)
    assert len([name for name in names_of(folder) if name.startswith("test/")]) == 3
    for file in folder.rglob("*.png"):
        assert np.asarray(Image.open(file)).std() > 5  # something is drawn


def test_tensorboard_gets_pictures_of_each_second_epoch_and_the_last(tmp_path):
    fitter = fit(MetricsMonitor(multiclass_metrics(4), log_plots=2), TensorBoardLogger(tmp_path), table(20)[:2])
    events = EventAccumulator(fitter.logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["val/confusion_matrix", "val/curves"]
    assert [event.step for event in events.Images("val/curves")] == [10, 15]


@cases(
    "metrics, columns, expected",
    (binary_metrics(), (torch.rand(20), torch.arange(20) % 2), ["confusion_matrix", "curves"]),
    (multilabel_metrics(3), (torch.rand(20, 3), torch.rand(20, 3).round().long()), ["confusion_matrix", "curves"]),
    (regression_metrics(), (torch.rand(20), torch.rand(20)), []),
    ids=["binary", "multilabel", "regression"],
)
def test_what_makes_no_sense_is_not_drawn(tmp_path, metrics, columns, expected):
    fit(MetricsMonitor(metrics), CSVLogger(tmp_path), columns, epochs=1)
    assert [name.rpartition("/")[2].rpartition("_")[0] for name in names_of(tmp_path)] == expected


def test_plots_can_be_off(tmp_path):
    fit(MetricsMonitor(multiclass_metrics(4), log_plots=False), CSVLogger(tmp_path), table(20)[:2], epochs=1)
    assert names_of(tmp_path) == []


def test_without_matplotlib_a_line_is_logged_and_the_fit_continues(tmp_path, monkeypatch, lightning_log):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monitor = MetricsMonitor(multiclass_metrics(4))
    fit(monitor, CSVLogger(tmp_path), table(20)[:2], epochs=1)
    assert names_of(tmp_path) == []
    assert len([line for _, line in lightning_log if "logs no plots" in line and "'reports'" in line]) == 1
    with pytest.raises(ModuleNotFoundError, match="extra 'reports'"):
        monitor.plot()


def other_logger(way, taken):
    """What a logger of a package that this machine lacks has for pictures, and nothing else; it keeps what it gets."""
    of_mlflow = SimpleNamespace(log_image=lambda run_id, image, artifact_file: taken.append((artifact_file, 7, image)))
    of_comet = SimpleNamespace(log_image=lambda image, name, step: taken.append((name, step, image)))
    loggers = {
        "wandb": {"log_image": lambda key, images, step: taken.append((key, step, images[0]))},
        "mlflow": {"run_id": "run", "experiment": of_mlflow},
        "comet": {"experiment": of_comet},
        "none": {"log_dir": None},
    }
    return SimpleNamespace(**loggers[way])


@pytest.mark.parametrize("way", ["wandb", "mlflow", "comet", "none"])
def test_every_logger_that_can_gets_the_picture(way):
    taken, picture = [], np.zeros((4, 5, 3), np.uint8)
    logger = other_logger(way, taken)
    assert can_log_images([logger]) == (way != "none")
    log_image([logger], "val/curves", picture, 7)
    key = "pictures/val/curves_000007.png" if way == "mlflow" else "val/curves"
    assert [(name, step, image.shape) for name, step, image in taken] == [(key, 7, (4, 5, 3))] * (way != "none")


def test_the_matrix_is_drawn_as_it_is():
    matrix = torch.tensor([[8, 2], [0, 5]])
    counts, shares = confusion_figure(matrix, ["cat", "dog"]).axes
    assert counts.images[0].get_array().tolist() == [[8, 2], [0, 5]]
    assert shares.images[0].get_array().tolist() == [[0.8, 0.2], [0, 1]]
    assert [text.get_text() for text in shares.texts] == ["0.80", "0.20", "1.00"]
    assert counts.get_ylabel() == "target"
    large = confusion_figure(torch.ones(60, 60, dtype=torch.int64))
    assert not large.axes[0].texts
    assert as_array(large).shape[2] == 3


def test_curves_and_bars_are_those_of_the_classes():
    generator = torch.Generator().manual_seed(0)
    histograms = torch.randint(0, 5, (4, 2, 300), generator=generator)
    figure = curves_figure(histograms, "multiclass", ["a", "b", "c"])
    assert [line.get_label() for line in figure.axes[1].lines] == ["a", "b", "c"]
    bars = classes_figure({"f1": {"a": 0.5, "b": 1.0}, "recall": {"a": 0.2, "b": 0.3}})
    assert [patch.get_height() for patch in bars.axes[0].patches] == [0.5, 1.0, 0.2, 0.3]


def test_several_loaders_have_pictures_of_their_own(tmp_path):
    from tests.metrics.tables import Table

    data = DataLoader(TensorDataset(*table(8)[:2]), 4)
    monitor = MetricsMonitor(multiclass_metrics(4))
    fitter = Trainer(callbacks=[monitor], **{**QUIET, "logger": CSVLogger(tmp_path)})
    fitter.validate(Table(), [data, data], verbose=False)
    assert {name.split("/")[-2] for name in names_of(tmp_path)} == {"0", "1"}


class Mute(Logger):
    """A logger that takes numbers alone; on other ranks than zero its experiment is Lightning's dummy, as usual."""

    name = version = "mute"

    @property
    @rank_zero_experiment
    def experiment(self):
        return object()

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def test_ranks_agree_on_whether_there_is_a_logger_for_pictures():
    callbacks = [MetricsMonitor(multiclass_metrics(4)), ImageLogger(shape=[1, 2, 2])]
    fitter = Trainer(callbacks=callbacks, **{**QUIET, "logger": Mute()}, strategy="ddp_fork", devices=2)
    with without_warnings():  # Lightning's advice to test on one process
        (values,) = fitter.test(OneLoader(), loader_of(*table(9)[:2]), verbose=False)
    assert "test/f1" in values
