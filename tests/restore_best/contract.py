"""What RestoreBest promises."""

import torch
from lightning.pytorch import Callback

from lightning_tricks import RestoreBest
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting, full
from tests.small import EvaluatedNet, same, unseen


class Watches(Callback):
    """The reference implementation: all weights and buffers at each validation, and those at the very end."""

    def __init__(self, folder, monitor="loss"):
        self.folder, self.monitor = folder, monitor
        self.seen = unseen([])  # which AutoResume does not see

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen().append((trainer.callback_metrics[self.monitor].item(), state_of(pl_module)))

    def teardown(self, trainer, pl_module, stage):
        torch.save((self.seen(), state_of(pl_module)), self.folder / f"{trainer.global_rank}.pt")


def state_of(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: full(tensor) for name, tensor in tensors.items()}


class Validated(EvaluatedNet):
    """Logs what rises from epoch to epoch, and is the same on all ranks."""

    def evaluate(self, batch, batch_idx):
        self.log("worse", self.trainer.current_epoch + 0.0, sync_dist=True)

    validation_step = test_step = evaluate


def verify(lab: Lab, setting: Setting, callback: type = RestoreBest) -> None:
    """On each rank the module ends with the bits of the validation that was the best, which is not the last."""
    for mode in ("min", "max"):
        folder = lab.folder / f"{setting.name} {mode}"
        folder.mkdir()
        net = Validated(**{**lab.net, **setting.net})
        lab.fit([callback("worse", mode), Watches(folder, "worse")], setting, module=net)
        files = sorted(folder.iterdir())
        assert len(files) == setting.ranks
        for file in files:
            seen, final = torch.load(file, weights_only=False)
            assert len(seen) == 2
            assert not same(seen[0][1], seen[1][1])
            assert same(final, seen[0 if mode == "min" else 1][1])


CASES = (
    Case(
        callback=RestoreBest,
        arguments={"monitor": "loss", "mode": "max"},
        kind="observer",  # of the training: it acts when that has ended
        neutral=None,
        why_no_neutral="a fit either ends with the best weights or does without the callback",
        instances=1,
        waits={"on_validation_end": 2, "on_fit_end": 2},  # for the value of each validation; to put the weights back
        verify=verify,
    ),
)
