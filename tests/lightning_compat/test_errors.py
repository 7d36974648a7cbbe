"""A probe of the errors of a run, on the rank on which they are raised; run with the oldest and newest Lightning."""

from contextlib import ExitStack

import pytest
from lightning.pytorch import Trainer
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_tricks._lightning_compat.observers import observe_errors
from tests.small import QUIET, EvaluatedNet, Hooks, cases, loader


class _Fails(EvaluatedNet):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def fail(self, where):
        if where == self.where:
            raise ZeroDivisionError(where)

    def training_step(self, batch, batch_idx):
        self.fail("train")
        return super().training_step(batch, batch_idx)

    def evaluate(self, batch, batch_idx):
        self.fail("val")
        return super().evaluate(batch, batch_idx)

    validation_step = test_step = evaluate

    def predict_step(self, batch, batch_idx):
        self.fail("predict")
        return super().predict_step(batch, batch_idx)

    def configure_optimizers(self):
        self.fail("setup")
        return super().configure_optimizers()


def _observes(folder):
    def setup(trainer, module, stage):
        def on_error(error):
            with (folder / f"rank{trainer.global_rank}").open("a") as file:
                file.write(f"{error!r}\n")

        installed.enter_context(observe_errors(trainer, on_error, "Probe"))

    installed = ExitStack()
    return Hooks(setup=setup, teardown=lambda *_, **__: installed.close(), on_exception=lambda *_: installed.close())


@cases(
    "function, where, options, count",
    ("fit", "train", {}, 1),
    ("fit", "val", {}, 2),  # by the loop of validation, and by the one around it
    ("fit", "val", {"num_sanity_val_steps": 1}, 1),
    ("fit", "setup", {}, 1),
    ("validate", "val", {}, 1),
    ("test", "val", {}, 1),
    ("predict", "predict", {}, 1),
)
def test_errors_of_each_loop(tmp_path, function, where, options, count):
    trainer = Trainer(max_epochs=1, callbacks=[_observes(tmp_path)], **{**QUIET, **options})
    loaders = (loader(), loader()) if function == "fit" else (loader(),)
    with pytest.raises(ZeroDivisionError):
        getattr(trainer, function)(_Fails(where), *loaders)
    assert (tmp_path / "rank0").read_text() == f"ZeroDivisionError('{where}')\n" * count
    assert "run" not in vars(trainer.fit_loop)
    assert "setup" not in vars(trainer.strategy)


def test_errors_of_forked_ranks(tmp_path):
    options = {**QUIET, "strategy": "ddp_fork", "devices": 2}
    trainer = Trainer(max_epochs=1, callbacks=[_observes(tmp_path)], **options)
    with pytest.raises(ProcessRaisedException):
        trainer.fit(_Fails("train"), loader(), loader())
    assert "ZeroDivisionError('train')" in "".join(path.read_text() for path in tmp_path.iterdir())
