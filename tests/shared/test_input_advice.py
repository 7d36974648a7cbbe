"""The advice in the error for inputs that are not tensors."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import FlopsReport, count_flops
from lightning_tricks.model_report import summarize_model
from tests.shared.test_trainer_stub import Classifier
from tests.small import QUIET, cases, loader

CONV = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
IMAGES = torch.zeros(2, 3, 8, 8)
DATA = TensorDataset(IMAGES, torch.zeros(2))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x, y):
        return self.layer(x) + self.layer(y)


class Noise(nn.Module):
    """Takes a number, and is right to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, n):
        return self.layer(torch.randn(n, 8))


@cases(
    "model, inputs, words",
    (CONV, (3, 8, 8), r"inputs: (3, 8, 8) is a shape, .* takes tensors, such as torch.zeros(1, 3, 224, 224)."),
    (CONV, IMAGES.shape, r"(2, 3, 8, 8) is a shape, "),
    (CONV, {"input_size": (1, 3, 8, 8)}, r"is a shape, .* such as torch.zeros(1, 3, 224, 224)."),
    (CONV, 224, r"is a shape, "),
    (CONV, np.zeros((1, 3, 8, 8)), r"a numpy array is not a tensor. Give torch.as_tensor(array, dtype=torch.float32)."),
    (CONV, DataLoader(DATA), r"a DataLoader is not a batch. Give a batch, next(iter(loader)), or the part of it that"),
    (CONV, DATA, r"a TensorDataset is not a batch. Give a batch, next(iter(DataLoader(dataset))), or the part"),
    (CONV, [IMAGES, torch.zeros(2)], r"Sequential.forward does not take this list of 2, .* such as batch[0]."),
    (CONV, {"image": IMAGES}, r"Sequential.forward does not take this dict of 1, .* such as batch['image']."),
    (CONV, "cuda", r"'cuda' is not a tensor. Give torch.zeros(1, 3, 224, 224)."),
    (Sum(), ((1, 8), (1, 8)), r"are shapes, .* such as torch.zeros(1, 8)."),
    (nn.Embedding(10, 3), (5,), r"such as torch.zeros(1, 16, dtype=torch.long)."),
    (Classifier(), DataLoader(DATA), r"a DataLoader is not a batch. Give a batch, next(iter(loader))."),
    (Classifier(), [np.zeros((4, 8)), np.zeros(4)], r"a numpy array is not a tensor."),
)
@pytest.mark.parametrize("function", [count_flops, summarize_model])
def test_what_is_no_tensor(function, model, inputs, words):
    with pytest.raises(TypeError) as error:
        function(model, inputs)
    for part in words.split(" .* "):
        assert part in str(error.value)


@cases(
    "model, words",
    (CONV, r"torch.zeros(1, 3, 224, 224)"),
    (nn.Conv1d(2, 3, 3), r"torch.zeros(1, 2, 224)"),
    (nn.Linear(8, 2), r"torch.zeros(1, 8)"),
    (nn.Embedding(10, 3), r"torch.zeros(1, 16, dtype=torch.long)"),
    (nn.GRU(8, 2), r"torch.zeros(1, 16, 8)"),
    (nn.ReLU(), r"torch.zeros(1, 3, 224, 224)"),
)
def test_no_inputs(model, words):
    with pytest.raises(ValueError, match=r"inputs=None needs an example_input_array, and .* has none") as error:
        count_flops(model)
    assert f"give inputs, such as {words}." in str(error.value)
    count_flops(model, eval(words))


def test_numbers_that_a_model_takes_are_no_shape():
    assert count_flops(Noise(), (4,)).macs == count_flops(Noise(), 4).macs == 4 * 8 * 2


def test_the_models_own_error_stays():
    with pytest.raises(RuntimeError, match="called on a copy of the model: forward"):
        count_flops(CONV, torch.zeros(1, 4, 8, 8))
    with pytest.raises(RuntimeError, match=r"forward\(input=tensor \(1, 4, 8, 8\) float32\), from inputs"):
        count_flops(CONV, {"input": torch.zeros(1, 4, 8, 8)})
    with pytest.raises(TypeError, match=r"torch.zeros.* \(TypeError: .*takes 2 positional arguments"):
        count_flops(CONV, (3, 8, 8))


def test_a_fit_says_whose_inputs_they_are():
    trainer = Trainer(max_epochs=1, callbacks=[FlopsReport((3, 224, 224))], **QUIET)
    with pytest.raises(TypeError, match=r"FlopsReport\(inputs=\.\.\.\): \(3, 224, 224\) is a shape"):
        trainer.fit(Classifier(), loader())
