"""Models of text: a transformer of one's own, and those of transformers, whose batches and outputs are objects."""

import math

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from tests.styles.frame import BATCHES, Job, style

WORDS = 20


class Blocks(Dataset):
    """Windows of one long text."""

    def __init__(self, length=8):
        self.text = torch.randint(WORDS, (4 * BATCHES * length + 1,), generator=torch.Generator().manual_seed(1))
        self.length = length

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        return self.text[index * self.length : (index + 1) * self.length + 1]


class LanguageModel(LightningModule):
    """Tied embeddings, a causal mask, decay for matrices alone, warm-up over the estimated steps."""

    def __init__(self, width=16, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.zeros(1, 8, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens) * math.sqrt(self.hparams.width) + self.position
        return self.head(self.blocks(x, mask=mask, is_causal=True))

    def shared_step(self, batch, stage):
        scores = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.log(f"{stage}/loss", loss, prog_bar=True, batch_size=len(batch))
        self.log(f"{stage}/ppl", loss.detach().exp(), on_step=False, on_epoch=True, batch_size=len(batch))
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")

    def configure_optimizers(self):
        parameters = dict(self.named_parameters())
        groups = [
            {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


@style()
def transformer_language_model(job: Job) -> None:
    loaders = [DataLoader(Blocks(), batch_size=4, shuffle=shuffle) for shuffle in (True, False)]
    job.fit(LanguageModel(), *loaders, accumulate_grad_batches=2)


class Sentences(Dataset):
    """Tokens of differing lengths, with labels, as `datasets` gives them."""

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        tokens = [(7 * index + place) % WORDS for place in range(3 + index % 5)]
        return {"input_ids": tokens, "labels": index % 3}


def padded(samples):
    """As the tokenizers' collators do it."""
    width = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    mask = [[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"])) for s in samples]
    labels = [sample["labels"] for sample in samples]
    return BatchEncoding({"input_ids": rows, "attention_mask": mask, "labels": labels}, tensor_type="pt")


class FineTuner(LightningModule):
    def __init__(self, whole_output):
        super().__init__()
        self.save_hyperparameters()
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        self.model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **size))

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("train_loss", outputs.loss)
        if self.hparams.whole_output:
            return outputs
        return {"loss": outputs.loss, "preds": outputs.logits, "target": batch["labels"]}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self(**batch)
        return {"loss": outputs[0], "preds": outputs.logits, "target": batch["labels"]}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _fine_tune(job, whole_output):
    train, held_out = (DataLoader(Sentences(), 4, shuffle=shuffle, collate_fn=padded) for shuffle in (True, False))
    job.fit(FineTuner(whole_output), train, held_out)


@style(metrics={"task": "multiclass", "num_classes": 3})
def transformers_with_batch_encodings(job: Job) -> None:
    _fine_tune(job, whole_output=False)


@style()
def step_that_returns_a_model_output(job: Job) -> None:
    _fine_tune(job, whole_output=True)
