"""The life of a callback is in its base: what it installs is undone, and a run forgotten, however the run ends."""

import inspect
import pickle
from contextlib import nullcontext

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_tricks._callback import TrickCallback
from tests.contract.cases import CASES
from tests.small import QUIET, Net, cases, loader


class Ends(Callback):
    """Counts how many runs have ended."""

    ended = 0

    def teardown(self, trainer, pl_module, stage):
        self.ended += 1

    def on_exception(self, trainer, pl_module, exception):
        self.ended += 1


class Installs(TrickCallback, Ends):
    """Installs three things, and raises where it is told to; another callback that it extends is told of the end."""

    def __init__(self, fails_in=()):
        super().__init__()
        self.fails_in = fails_in
        self.undone = []

    def _forget_run(self):
        self.module = None

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        for number in range(3):
            self._installed.callback(self.undo, number)
            self.fail("setup", number)
        self.module = pl_module

    def undo(self, number):
        self.undone.append(number)
        self.fail("undo", number)

    def fail(self, *place):
        if place in self.fails_in:
            raise RuntimeError(" ".join(map(str, place)))

    def on_train_start(self, trainer, pl_module):
        self.copy = pickle.loads(pickle.dumps(self))
        self.fail("train")
        super().on_train_start(trainer, pl_module)


@cases(
    "fails_in, raised, undone",
    ([], None, [2, 1, 0]),
    ([("train",)], "train", [2, 1, 0]),
    ([("setup", 1)], "setup 1", [1, 0]),
    ([("undo", 1)], "undo 1", [2, 1, 0]),
    ([("train",), ("undo", 2)], "undo 2", [2, 1, 0]),
)
def test_all_is_undone_and_the_run_forgotten(fails_in, raised, undone):
    callback = Installs(fails_in)
    for number in range(2):  # the same one
        callback.undone.clear()
        trainer = Trainer(callbacks=[callback], max_epochs=1, **QUIET)
        with pytest.raises(RuntimeError, match=raised) if raised else nullcontext():
            trainer.fit(Net(), loader())
        assert callback.undone[:3] == undone
        assert callback.ended > number
        assert callback.module is None
        if ("setup", 1) not in fails_in:
            assert callback.copy.module is None
            assert "_installed" not in vars(callback.copy)


def test_a_run_that_had_no_end_is_ended_by_the_next():
    callback = Installs()
    callback.setup(Trainer(callbacks=[callback], **QUIET), Net(), "fit")
    callback.setup(Trainer(callbacks=[callback], **QUIET), Net(), "fit")
    assert callback.undone == [2, 1, 0]


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_fit_end", "teardown", "on_exception"])
def test_overrides_call_the_base(hook):
    kinds = [CASES[name].callback for name in CASES]
    owners = {base for kind in kinds for base in kind.__mro__ if hook in vars(base) and base is not Callback}
    assert TrickCallback in owners
    silent = [owner.__name__ for owner in owners if f"super().{hook}(" not in inspect.getsource(vars(owner)[hook])]
    assert silent == ([] if hook in ("teardown", "on_exception") else ["TrickCallback"])
