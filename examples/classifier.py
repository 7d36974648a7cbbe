import lightning
from torch.nn.functional import cross_entropy
from lightning_tricks import Tricks, TricksMixin
from lightning_tricks.demo import Digits, DigitsNet  # your data and your net
class Classifier(TricksMixin, lightning.LightningModule):
    def __init__(self, tricks):
        super().__init__(tricks=tricks)  # seeds before the net is made
        self.net = DigitsNet()
    def training_step(self, batch):
        scores = self.net(batch[0])
        return {"loss": cross_entropy(scores, batch[1]), "preds": scores, "target": batch[1]}
    validation_step = training_step
task = {"task": "multiclass", "num_classes": 10}
trainer = lightning.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)
trainer.fit(Classifier(Tricks(seed_everything=42, gradient_clipping=1, metrics_monitor=task, optimizer=True)), Digits())
