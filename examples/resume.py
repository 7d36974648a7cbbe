import lightning
import torch
from lightning_tricks import AutoResume, seed_everything
from lightning_tricks.demo import Digits, DigitsNet  # your data and your net
class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = DigitsNet()
    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
seed_everything(42)  # kill it at any time, and run it again
trainer = lightning.Trainer(max_epochs=3, callbacks=[AutoResume("runs/resume", every_n_train_steps=10)])
trainer.fit(Classifier(), Digits())
