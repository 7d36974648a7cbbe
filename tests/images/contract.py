"""What ImageLogger promises."""

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from lightning_tricks import ImageLogger
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting


def verify(lab: Lab, setting: Setting, callback: type = ImageLogger) -> None:
    """However the net is trained, the grid is the one of its most confident mistakes on all ranks."""
    logger = CSVLogger(lab.folder / f"grid of {setting.name}")
    images = callback(4, 2, shape=[1, 8, 8], stages=["train"])
    lab.fit([images, _Seen(lab.folder, setting.name)], setting, logger=logger, log_every_n_steps=1)
    (file,) = (lab.folder / f"grid of {setting.name}").rglob("images_*.png")  # of the second epoch alone
    grid = np.asarray(Image.open(file))
    worst = torch.cat([torch.load(part) for part in sorted(lab.folder.glob(f"{setting.name}-*.pt"))])
    first = worst[worst[:, 0].argmax(), 1:].reshape(8, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    shown = grid[2:66, :, 0].astype(float)
    expected = (first * 255).round().numpy()
    places = [
        place for place in range(shown.shape[1] - 63) if np.abs(shown[:, place : place + 64] - expected).max() <= 2
    ]
    assert places, "the most confident mistake does not come first"
    assert min(places) < shown.shape[1] / 2


class _Seen(Callback):
    """The reference implementation: each sample of the last epoch, with its confidence if it is a mistake."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def on_train_epoch_start(self, trainer, pl_module):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for scores, target, pixels in zip(outputs["preds"], outputs["target"], batch[0], strict=True):
            confidence, predicted = scores.detach().float().softmax(0).max(0)
            worth = confidence if predicted != target else torch.tensor(-1.0)
            self.rows.append(torch.cat([worth.reshape(1).cpu(), pixels.float().cpu()]))

    def on_train_end(self, trainer, pl_module):
        torch.save(torch.stack(self.rows), self.folder / f"{self.name}-{trainer.global_rank}.pt")


CASES = (
    Case(
        callback=ImageLogger,
        arguments={"n": 9, "every_n_epochs": 2, "shape": [1, 8, 8], "stages": ["train"]},
        kind="observer",
        neutral={"stages": []},
        instances=1,
        verify=verify,
    ),
)
