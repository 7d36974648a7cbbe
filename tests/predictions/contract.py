"""What PredictionWriter promises."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from packaging.version import Version

from lightning_tricks import PredictionWriter
from lightning_tricks.seeding import isolated_rng
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import EvaluatedNet, digits, fork, loader, real_fp16


def verify(lab: Lab, setting: Setting, callback: type = PredictionWriter) -> None:
    """However a net predicts, the file has what the steps returned, of each digit once and in order."""
    if setting.sharded and Version(torch.__version__) < Version("2.7"):
        pytest.skip("FSDP2 of torch 2.6 needs an accelerator")
    folder = lab.folder / f"predictions in {setting.name}"
    folder.mkdir()

    def run(rank: int = 0) -> None:
        with isolated_rng(seed=0):
            module = EvaluatedNet(**{**lab.net, **setting.net})
        options = {**lab.quiet, **setting.trainer, "callbacks": [_Seen(folder), callback(folder / "out.pt")]}
        if setting.accelerator:
            options["accelerator"] = setting.accelerator.replace("emulated", "cuda")
        if setting.fp16:
            options["plugins"] = [real_fp16("cuda" if options["accelerator"] == "cuda" else "cpu")]
        if setting.sharded:
            options["strategy"] = ModelParallelStrategy(setting.ranks, tensor_parallel_size=1)
        Trainer(**options).predict(module, loader(), return_predictions=False)

    fork(run, setting.ranks) if setting.sharded else run()
    parts = [torch.load(file) for file in sorted(folder.glob("seen-*.pt"))]
    assert len(parts) == setting.ranks
    seen = {number: scores for part in parts for number, scores in part.items()}
    written = torch.load(folder / "out.pt", weights_only=True)
    assert written["index"].tolist() == [*range(len(digits()))]
    for number, scores in enumerate(written["prediction"]):
        assert torch.equal(scores, seen[number])


class _Seen(Callback):
    """The reference implementation: what each step returned, by the pixels of the digits that it saw."""

    def __init__(self, folder):
        self.folder, self.rows = folder, {}

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        for pixels, scores in zip(batch[0].float().cpu(), outputs, strict=True):
            (number,) = (digits().tensors[0] - pixels).abs().sum(1).lt(1e-3).nonzero()[0].tolist()
            self.rows[number] = scores.cpu()

    def on_predict_end(self, trainer, pl_module):
        torch.save(self.rows, self.folder / f"seen-{trainer.global_rank}.pt")


CASES = (
    Case(
        callback=PredictionWriter,
        arguments={"path": "predicted", "format": "npz", "columns": ["pred*"], "resume": True},
        kind="observer",
        neutral=None,
        why_no_neutral="it changes nothing in any setting",
        of_one_fit=("path",),
        instances=1,
        writes_to="path",
        verify=verify,
    ),
)
