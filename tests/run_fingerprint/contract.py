"""What RunFingerprint promises."""

import warnings

import torch
from lightning.pytorch import Callback

from lightning_tricks import RunFingerprint
from lightning_tricks.run_fingerprint import compare, read_ranks
from lightning_tricks.run_fingerprint.core.ranks import compare_ranks
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting


class FlipsBit(Callback):
    """Flips one bit of one bias of the last layer, before a batch, on the last rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 3) and trainer.global_rank == trainer.world_size - 1:
            bias = list(pl_module.parameters())[-1].detach()
            local = bias.to_local() if hasattr(bias, "to_local") else bias
            local.view(torch.uint8)[-1] ^= 1


def verify(lab: Lab, setting: Setting, callback: type = RunFingerprint) -> None:
    """Two runs of a seed are found equal; one flipped bit of one weight is found in its step and layer."""
    records, net = {}, {"dropout": 0.2}
    for name, fault in (("first", []), ("second", []), ("flipped", [FlipsBit()])):
        path = lab.folder / f"{setting.name} {name}.jsonl"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore" if fault else "error", "RunFingerprint: The weights of rank 1 differ")
            lab.fit([callback(path, detail="layer"), *fault], setting, net=net)
        records[name] = read_ranks(path)
    equal = compare(records["first"], records["second"])
    assert (equal.divergence, equal.equal_batches) == (None, 20)
    if setting.ranks > 1:
        weights = 0 if setting.sharded else 11
        assert compare_ranks(records["first"]).compared == {"data": 10, "rate": 10, "replicated": weights, "dataset": 1}
    divergence = compare(records["first"], records["flipped"]).divergence
    assert (divergence.epoch, divergence.batch_idx, divergence.kind) == (1, 3, "forward")
    assert divergence.rank == (0 if setting.sharded else setting.ranks - 1)  # shards are gathered on all
    assert divergence.layer == ("net" if setting.net.get("compiled") else "net.4")


CASES = (
    Case(
        callback=RunFingerprint,
        arguments={"path": "recorded", "every_n_train_steps": 2, "detail": "layer", "compare_ranks": False},
        kind="observer",
        neutral=None,
        why_no_neutral="it changes nothing in any setting",
        of_one_fit=("path", "_digest", "_num_rows", "_num_rows_to_keep"),
        instances=1,
        writes_to="path",
        waits={"on_train_batch_end": 1, "on_train_end": 1},
        verify=verify,
    ),
)
