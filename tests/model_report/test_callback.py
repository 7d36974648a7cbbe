"""ModelReport in real fits."""

import json

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_tricks import ModelReport
from tests.contract.lab import SETTINGS
from tests.small import Net, cases, fit, loader


def test_prints_once_after_the_first_step(capsys):
    report = ModelReport(verbose=True)
    fit(None, report, max_epochs=2)
    text = capsys.readouterr().out
    assert text.count("Parameters of Net") == 1
    text = " ".join(text.split())
    for words in ("net.1.weight", "grad norm", "optimizer state 9.", "LayerNorm", "TrainingStep"):
        assert words in text
    assert all(row.grad_norm is not None for row in report.summary.parameters)


def test_waits_for_the_first_step_of_a_fit_under_accumulation():
    """And runs the training step with the batch and the number that it has then."""
    seen = []

    class Knows(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.now = batch_idx

        def training_step(self, batch, batch_idx):
            assert batch_idx == self.now
            return super().training_step(batch, batch_idx)

    class Watches(ModelReport):
        def _report(self, trainer, pl_module, batch, batch_idx):
            seen.append((batch_idx, trainer.global_step))
            super()._report(trainer, pl_module, batch, batch_idx)

    trainer = fit(module := Knows(), Watches(), accumulate_grad_batches=4)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert seen == [(3, 1), (3, 4)]


def test_measures_the_state_of_all_optimizers():
    trainer = fit(Net(optimization="manual"), report := ModelReport(graph=False))
    sizes = [value.nbytes for one in trainer.optimizers for state in one.state.values() for value in state.values()]
    assert report.summary.memory.optimizer_state == sum(sizes) > 0


def test_example_input_array_and_depth():
    class Forwards(Net):
        example_input_array = torch.zeros(7, 64)

        def forward(self, x):
            return self.net(x)

    report = ModelReport(depth=1)
    fit(Forwards(), report)
    assert "[7, 64]" in report.summary.layers
    assert "LayerNorm" not in report.summary.layers


def test_depth_counts_from_the_module_where_its_training_step_is_run():
    layers = []
    for depth in (1, 2):
        report = ModelReport(depth=depth)
        fit(None, report)
        layers.append(report.summary.layers)
    assert "Sequential" in layers[0]
    assert "LayerNorm" not in layers[0]
    assert "LayerNorm" in layers[1]


def test_an_example_that_does_not_fit_is_a_warning():
    class Wrong(Net):
        example_input_array = torch.zeros(7, 63)

        def forward(self, x):
            return self.net(x)

    report = ModelReport()
    with pytest.warns(UserWarning, match=r"leaves out layers and graph: RuntimeError: (.|\n)*from example_input_array"):
        trainer = fit(Wrong(), report)
    assert trainer.global_step == 10
    assert report.summary.layers is None
    assert len(report.summary.parameters) == 6


def test_files_that_cannot_be_written_are_a_warning(tmp_path):
    (tmp_path / "file").touch()
    report = ModelReport(tmp_path / "file", graph=False)
    with pytest.warns(UserWarning, match="ModelReport did not write all files to dirpath='.*file': FileExistsError"):
        trainer = fit(None, report)
    assert trainer.global_step == 10
    assert report.summary is not None


def test_goes_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path / name) for name in "ab"]
    fit(None, ModelReport(tmp_path / "report"), logger=loggers, log_every_n_steps=5)
    for logger in loggers:
        (event,) = EventAccumulator(logger.log_dir).Reload().Tensors("model_report/text_summary")
        assert b"net.0.weight" in event.tensor_proto.string_val[0]
        assert event.step == 1
    assert json.loads((tmp_path / "report" / "report.json").read_text())["model"] == "Net"


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_two_ranks_report_once(lab, capfd, name):
    ranks = lab.fit([ModelReport(lab.folder / "report", verbose=True)], SETTINGS[name])
    assert len(ranks) == 2
    assert capfd.readouterr().out.count("Parameters of Net") == 1
    report = json.loads((lab.folder / "report" / "report.json").read_text())
    assert report["parameters"][0]["shape"] == [16, 64], "whole, also where it is sharded"


@cases(
    "arguments, error, words",
    ({"depth": 0}, ValueError, "depth must be a whole number >= 1, got 0"),
    ({"graph": "svg"}, TypeError, "graph must be True, False or a dict of options, got 'svg'"),
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        ModelReport(**arguments)


class _WithUnused(Net):
    """Has a part that no rank needs, and one that only rank zero needs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.spare = torch.compile(torch.nn.Linear(1, 1, bias=False), backend="eager")
        self.of_rank_zero = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 0:
            step["loss"] = step["loss"] * self.of_rank_zero.sum()
        return step


def test_names_the_parameters_without_a_gradient(capsys, tmp_path):
    report = ModelReport(tmp_path, verbose=True)
    fit(_WithUnused(), report, accumulate_grad_batches=2)
    assert report.summary.without_gradient == ("spare.weight",)
    assert json.loads((tmp_path / "report.json").read_text())["without_gradient"] == ["spare.weight"]
    assert "1 trainable parameter got no gradient: spare.weight." in " ".join(capsys.readouterr().out.split())
    fit(_WithUnused(optimization="manual"), report)  # whose backward pass comes before the other part
    assert report.summary.without_gradient == ("of_rank_zero", "spare.weight")
    fit(None, report)
    assert report.summary.without_gradient == ()


class _Toggles(Net):
    """Freezes all but one part for each backward pass, as a GAN does; each part has a parameter that is not used."""

    def __init__(self, raw):
        super().__init__(optimization="manual")
        self.raw = raw
        self.spare = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            loss.backward() if self.raw else self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        parts = [*self.net[0].parameters(), self.spare[0]], [*self.net[1:].parameters(), self.spare[1]]
        return [torch.optim.SGD(part, lr=0.1) for part in parts]


@pytest.mark.parametrize("raw", [False, True])
def test_names_them_where_parts_are_frozen_for_a_pass_and_where_it_is_run_past_lightning(raw):
    report = ModelReport(graph=False)
    fit(_Toggles(raw), report)
    assert report.summary.without_gradient == ("spare.0", "spare.1")


@pytest.mark.trap("finetuning: the unused-parameter error of DDP names nobody")
def test_names_them_with_their_ranks(tmp_path):
    """Before DDP stops with an error that names none."""
    with pytest.raises(ProcessRaisedException, match="parameters that were not used in producing the loss"):
        fit(_WithUnused(), ModelReport(tmp_path), strategy="ddp_fork", devices=2)
    names = json.loads((tmp_path / "report.json").read_text())["without_gradient"]
    assert names == ["spare.weight", "of_rank_zero (rank 1)"]


def test_names_them_where_ddp_looks_for_them(tmp_path):
    """DDP gives both ranks the mean of a gradient that one of them has."""
    fit(_WithUnused(), ModelReport(tmp_path), strategy="ddp_fork_find_unused_parameters_true", devices=2)
    assert json.loads((tmp_path / "report.json").read_text())["without_gradient"] == ["spare.weight"]
