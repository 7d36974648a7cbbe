"""What ValidateFirst promises."""

import json

import torch
from lightning.pytorch import Callback

from lightning_tricks import ValidateFirst
from tests.contract.case import Case
from tests.contract.checks import assert_same_run
from tests.contract.lab import Lab, Setting
from tests.small import EvaluatedNet


class Validations(Callback):
    """Writes the step, the epoch and the loss of each validation, in the order of the training batches."""

    def __init__(self, folder):
        self.folder = folder
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        loss = trainer.callback_metrics["loss"].item()
        self.seen.append([trainer.global_step, trainer.current_epoch, loss, trainer.sanity_checking])

    def on_train_batch_start(self, *args):
        self.seen.append("batch")

    def teardown(self, trainer, pl_module, stage):
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.seen))


class Drawing(EvaluatedNet):
    """Draws random numbers in validation, which would change those of training."""

    def validation_step(self, batch, batch_idx):
        torch.rand(3)
        self.log("loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


def verify(lab: Lab, setting: Setting, callback: type = ValidateFirst) -> None:
    """On each rank a validation precedes the first batch, and all that follows is as without it."""
    runs, seen = {}, {}
    for callbacks in ((), (callback,)):
        folder = lab.folder / f"{setting.name} {len(callbacks)}"
        folder.mkdir()
        torch.manual_seed(0)
        net = Drawing(**{"dropout": 0.2, **lab.net, **setting.net})
        runs[callbacks] = lab.fit([*(one() for one in callbacks), Validations(folder)], setting, module=net)
        seen[callbacks] = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    assert_same_run(runs[callback,], runs[()])
    assert len(seen[callback,]) == setting.ranks
    for (first, *rest), bare in zip(seen[callback,], seen[()], strict=True):
        assert (first[0], first[1], first[3]) == (0, 0, False)
        assert rest == bare
        assert first[2] != next(one for one in bare if one != "batch")[2]


CASES = (
    Case(
        callback=ValidateFirst,
        arguments={},
        kind="observer",
        neutral=None,
        why_no_neutral="it has no arguments",
        instances=1,
        verify=verify,
    ),
)
