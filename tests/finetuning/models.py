"""Models on which fine-tuning is tried, small ones, with inputs."""

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks.finetuning.core.adapter_coverage import watching_coverage


class TiedText(nn.Module):
    """A language model whose decoder has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(torch.tanh(self.middle(self.embedding(tokens))))


class Twice(nn.Module):
    """One layer that is used in two places, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class ReadsWeights(nn.Module):
    """Computes with the weights of its layers, as torchvision's Swin does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(24, 8)

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.qkv.weight, self.qkv.bias), self.proj.weight)


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)


def swin():
    from torchvision.models import swin_transformer

    return swin_transformer.SwinTransformer(
        [4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=5, stochastic_depth_prob=0.0
    )


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)
    nn.init.normal_(model.heads.head.weight)  # zero at first
    return model


def timm_vit():
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )


def timm_resnet():
    import timm

    return timm.create_model("resnet10t", num_classes=5, zero_init_last=False)


def bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=20, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, **off))


IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
TOKENS = torch.arange(10).view(2, 5)


def output(model: nn.Module, inputs: Tensor) -> Tensor:
    """The first tensor of what a model returns."""
    out = model(inputs)
    if isinstance(out, Tensor):
        return out
    return out[0]


def called(model: nn.Module, names, run) -> list[str]:
    with watching_coverage(model, names) as coverage:
        run()
    return coverage.called


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Give all added parameters values at which they do something."""
    generator = torch.Generator().manual_seed(seed)
    for _, module in added_modules(model):
        for parameter in module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
