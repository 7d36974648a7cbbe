"""thop as a backend: its counts, and modules that it has no rule for."""

import copy
import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import thop

from lightning_tricks import count_flops
from tests.small import cases

torchvision = pytest.importorskip("torchvision")


@cases("name", "alexnet", "resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5", "vit_b_32")
def test_parity(name):
    size = 224 if name.startswith("vit") else 64
    model, image = torchvision.models.get_model(name), torch.randn(1, 3, size, size)
    macs, params = thop.profile(copy.deepcopy(model), (image,), verbose=False)
    count = count_flops(model, image, backend="thop")
    assert count.macs == macs
    assert count.backend == "thop"
    if name != "vit_b_32":  # its class token is a bare parameter, which thop does not see
        assert count.params == params
        assert count.clever_format("%.3f") == thop.clever_format([macs, params], "%.3f")


def test_keywords_and_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x, state=None):
            return self.lstm(x, state)[0]

    x = torch.randn(2, 5, 8)
    assert count_flops(Net(), {"x": x}, backend="thop").macs == thop.profile(Net(), (x,), verbose=False)[0]


@pytest.mark.trap("flops: thop counts no attention and no functional call")
def test_compare_names_modules_without_a_thop_rule():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.attention, self.second = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            self.weight = nn.Parameter(torch.zeros(4, 8))

        def forward(self, x):
            x = self.linear(x)
            return nn.functional.linear(self.attention(x, x, self.second(x, x, x)[0])[0], self.weight)

    x = torch.randn(2, 5, 8)
    count = count_flops(Net(), x, compare=True)
    assert count.peer.backend == "thop"
    assert count.peer.macs == 10 * 64
    assert count.peer.uncounted == {"Net": 1, "MultiheadAttention": 2}
    assert {row.name: row.has_rule for row in count.peer.rows} == {
        "": False,
        "linear": True,
        "attention": False,
        "attention.out_proj": True,
        "second": False,
        "second.out_proj": True,
    }
    text = str(count)
    for words in ("thop's MACs", "no rule", "thop has no rule for: MultiheadAttention (2), Net (1)"):
        assert words in text
    reverse = count_flops(Net(), x, backend="thop", compare=True)
    assert (reverse.macs, reverse.peer.macs) == (count.peer.macs, count.macs)


@pytest.mark.trap("flops: thop fails on a compiled model")
def test_compiled():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    x = torch.randn(1, 1, 5, 5)
    compiled = torch.compile(model, backend="eager")
    assert count_flops(compiled, x, backend="thop") == count_flops(model, x, backend="thop")


def test_a_comparison_without_data_leaves_the_count_as_it_is():
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    count = count_flops(model, torch.empty(2, 3, device="meta"), compare=True)
    assert (count.macs, count.peer) == (24, None)
    assert "thop needs data" in count.notes[-1]
