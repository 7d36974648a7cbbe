"""A dry run of a model leaves no trace in anything that its training step can reach, inside the model or outside."""

import functools
import queue
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import FlopsReport, ModelReport, count_flops
from lightning_tricks._shared.dry_run.shared_state import restored_state
from lightning_tricks.model_report import summarize_model
from tests.small import QUIET

_SEEN: list = []
_COUNT = 0


class _Locked:
    """Cannot be copied, because of its lock."""

    def __init__(self):
        self.lock, self.items, self.by_name, self.count = threading.Lock(), [], {}, 0


@dataclass
class _Record:
    items: list = field(default_factory=list)


class _Slots:
    __slots__ = ("items",)

    def __init__(self):
        self.items = []


def _make(step):
    """Return a module with state of every kind, and a function that tells what its steps have left in it."""
    outside, count = [], 0

    class Keeps(LightningModule):
        losses: list = []  # noqa: RUF012  # as people write it
        by_name: dict = {}  # noqa: RUF012
        count = 0

        def __init__(self):
            super().__init__()
            self.layer, self.made = nn.Linear(4, 1), nn.ModuleList()
            self.register_buffer("running", torch.zeros(1))
            self.a_list, self.a_set, self.a_deque, self.counter = [], set(), deque(maxlen=3), Counter()
            self.by_key, self.ordered, self.nested = defaultdict(list), OrderedDict(), [({"x": []},)]
            self.record, self.slots, self.locked, self.queue = _Record(), _Slots(), _Locked(), queue.Queue()
            self.space, closed, boxed = types.SimpleNamespace(), [], []
            self.closes_over = closed.append
            self.keep = lambda value: closed.append(value)
            self.part = functools.partial(lambda value, into: into.append(value), into=self.a_list)
            self.space.keep = lambda value: boxed.append(value)
            self.kept = lambda: (closed, boxed)
            self.calls = 0

        def training_step(self, batch, batch_idx, seen=[]):  # noqa: B006
            nonlocal count
            global _COUNT
            loss = self.layer(batch).sum()
            lists = [self.a_list, self.a_deque, self.by_key["k"], self.nested[0][0]["x"], self.record.items, seen]
            lists += [self.slots.items, self.locked.items, self.losses, type(self).losses, Keeps.losses, outside, _SEEN]
            if self._trainer is not None:
                lists += [self.trainer.lightning_module.a_list, self.trainer.datamodule.seen]
            for losses in lists:
                losses.append(loss)
            for keep in (self.a_set.add, self.queue.put, self.closes_over, self.keep, self.part, self.space.keep):
                keep(loss)
            for names in (self.ordered, self.locked.by_name, self.by_name, self.counter):
                names["loss"] = loss
            self.space.loss = self.new = type(self).new = Keeps.training_step.loss = loss
            self.calls, self.locked.count, type(self).count = self.calls + 1, self.locked.count + 1, self.count + 1
            count, _COUNT = count + 1, _COUNT + 1
            self.running += 1
            self.layer.weight.register_hook(lambda gradient: None)
            self.layer.register_forward_hook(lambda *_: None)
            self.made.append(nn.Linear(1, 1))
            return step(self, loss)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def left():
        own = {name: value for name, value in vars(module).items() if name not in _LIGHTNINGS}
        spaces = [vars(space) for space in (module.record, module.locked, module.space)]
        places = [module.slots.items, list(module.queue.queue), module.kept(), Keeps.training_step.__defaults__]
        of_class = {name: value for name, value in vars(Keeps).items() if name[0] != "_"}
        hooks = [len(module.layer._forward_hooks), len(module.layer.weight._backward_hooks or ())]
        buffers = [buffer.tolist() for buffer in module.buffers()]
        function = vars(Keeps.training_step)
        return repr(
            [own, spaces, places, of_class, function, hooks, buffers, outside, count, _SEEN, _COUNT, module.made]
        )

    module = Keeps()
    return module, left


_LIGHTNINGS = ("_trainer", "_parameters", "_buffers", "_modules", "training")


@pytest.mark.parametrize("step", [lambda self, loss: loss, lambda self, loss: loss * (2 if loss > 0 else 1)])
@pytest.mark.parametrize("run", [functools.partial(count_flops, backward=True), summarize_model])
def test_a_dry_run_leaves_no_trace(run, step):
    """Without data, and with data where the step looks at its loss."""
    module, left = _make(step)
    before = left()
    run(module, torch.zeros(2, 4))
    assert left() == before


class _Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        return DataLoader(torch.zeros(6, 4), batch_size=2)


def test_a_fit_keeps_what_its_own_steps_left_and_nothing_more():
    module, _ = _make(lambda self, loss: loss)
    data = _Data()
    trainer = Trainer(max_epochs=1, callbacks=[FlopsReport(), ModelReport()], **QUIET)
    _SEEN.clear()
    trainer.fit(module, data)
    lists = (data.seen, module.record.items, module.locked.items, type(module).by_name, module.ordered, _SEEN)
    assert [len(values) for values in lists] == [3, 3, 3, 1, 1, 3]
    assert len(type(module).losses) == 9
    assert len(module.a_list) == 9
    assert (module.calls, module.locked.count, type(module).count) == (3, 3, 3)
    assert all(type(loss) is torch.Tensor for loss in (*module.a_list, *type(module).losses, *_SEEN))
    _SEEN.clear()


def test_a_table_that_makes_what_is_asked_for_is_put_back_as_it_was():
    class Makes(OrderedDict):  # as transformers' table of activations
        def __getitem__(self, key):
            return super().__getitem__(key)()

    table = Makes(relu=nn.ReLU)
    with restored_state(table):
        table["gelu"] = nn.GELU
    assert [*dict.items(table)] == [("relu", nn.ReLU)]
    with restored_state(table):
        pass
    assert type(table["relu"]) is nn.ReLU


def test_the_defaults_of_functions_are_put_back_as_they_were():
    def keep(value, seen=[], *, named=[]):  # noqa: B006
        seen.append(value)
        named.append(value)

    with restored_state(keep):
        keep(1)
    assert (keep.__defaults__, keep.__kwdefaults__) == (([],), {"named": []})
