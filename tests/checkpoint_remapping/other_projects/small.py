"""Small networks of many kinds, each in the words, the order and the layout of two projects or more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Part
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.checkpoint_remapping.other_projects.wording import (
    HIDDEN,
    LAYERS,
    Architecture,
    attention,
    batch_norms,
    convs,
    layer_norms,
    linear,
    values,
    worded,
)

ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    name: str, inputs: torch.Tensor, parts: Callable[[], dict[str, Any]], **projects: str
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Add a network under the names of each project; the function decorated computes its outputs."""

    def add(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        ARCHITECTURES[name] = Architecture(inputs, worded(parts, forward, **projects))
        return forward

    return add


def _lines(text: str) -> str:
    """Return the names of a wording that is written in one line, with commas."""
    return text.replace(",", "\n")


def _normed(*roles: str, channels: int = 16) -> dict[str, Any]:
    return {role: batch_norms(channels) for role in roles}


IMAGES, TOKENS, FEATURES = values(2, 3, 16, 16), values(2, 7, HIDDEN), values(4, HIDDEN)


# Residual networks


def _residual_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "norm1": batch_norms(16),
        "conv1": convs(16, 16, bias=False),
        "norm2": batch_norms(16),
        "conv2": convs(16, 16, bias=False),
        "last": nn.BatchNorm2d(16),
        "head": nn.Linear(16, 5),
    }


@architecture(
    "ResNet, normed before", IMAGES, _residual_parts,
    norm_first=_lines("stem conv1,norm1 layer{n}.bn1,conv1 layer{n}.conv1,norm2 layer{n}.bn2,conv2 layer{n}.conv2,"
                      "last bn,head fc"),
    conv_first=_lines("stem stem,conv1 blocks.{i}.conv1,conv2 blocks.{i}.conv2,norm1 blocks.{i}.bn1,"
                      "norm2 blocks.{i}.bn2,last norm,head head"),
    words=_lines("stem stem,norm1 blocks.{i}.norm_a,conv1 blocks.{i}.conv_a,norm2 blocks.{i}.norm_b,"
                 "conv2 blocks.{i}.conv_b,last final_norm,head classifier"),
    numbers=_lines("stem net.0,norm1 net.{n}.0,conv1 net.{n}.2,norm2 net.{n}.3,conv2 net.{n}.5,last net.4,"
                   "head net.7"),
)  # fmt: skip
def _normed_before(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        x = x + part.conv2[i](F.relu(part.norm2[i](part.conv1[i](F.relu(part.norm1[i](x))))))
    return part.head(F.relu(part.last(x)).mean((2, 3)))


@architecture(
    "ResNet, normed behind", IMAGES, _residual_parts,
    torchvision=_lines("stem conv1,last bn1,conv1 layer1.{i}.conv1,norm1 layer1.{i}.bn1,conv2 layer1.{i}.conv2,"
                       "norm2 layer1.{i}.bn2,head fc"),
    convs_first=_lines("stem stem.conv,last stem.norm,conv1 blocks.{i}.conv1,conv2 blocks.{i}.conv2,"
                       "norm1 blocks.{i}.norm1,norm2 blocks.{i}.norm2,head head"),
    second_first=_lines("head head,conv2 body.{i}.conv2,conv1 body.{i}.conv1,norm2 body.{i}.bn2,norm1 body.{i}.bn1,"
                        "stem stem,last stem_bn"),
    words=_lines("stem entry.filter,last entry.scale,conv1 unit.{i}.first.filter,norm1 unit.{i}.first.scale,"
                 "conv2 unit.{i}.second.filter,norm2 unit.{i}.second.scale,head scores"),
    HF=_lines("stem embedder.embedder.convolution,last embedder.embedder.normalization,"
              "conv1 encoder.layers.{i}.layer.0.convolution,norm1 encoder.layers.{i}.layer.0.normalization,"
              "conv2 encoder.layers.{i}.layer.1.convolution,norm2 encoder.layers.{i}.layer.1.normalization,"
              "head classifier.1"),
)  # fmt: skip
def _normed_behind(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(part.last(part.stem(x)))
    for i in range(LAYERS):
        x = F.relu(x + part.norm2[i](part.conv2[i](F.relu(part.norm1[i](part.conv1[i](x))))))
    return part.head(x.mean((2, 3)))


def _vgg_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "convs": convs(16, 16),
        "norms": batch_norms(16),
        "fc1": nn.Linear(16, 16),
        "fc2": nn.Linear(16, 16),
        "fc3": nn.Linear(16, 16),
    }


@architecture(
    "VGG", IMAGES, _vgg_parts,
    torchvision=_lines("stem features.0,convs features.{n}.0,norms features.{n}.1,fc1 classifier.0,"
                       "fc2 classifier.3,fc3 classifier.6"),
    words=_lines("stem conv_first,convs convs.{i},norms norms.{i},fc1 fc6,fc2 fc7,fc3 fc8"),
    norms_first=_lines("norms bn{n},convs conv{n},stem conv0,fc1 dense1,fc2 dense2,fc3 output"),
)  # fmt: skip
def _vgg(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(part.stem(x))
    for conv, norm in zip(part.convs, part.norms, strict=True):
        x = F.relu(norm(conv(x)))
    return part.fc3(F.relu(part.fc2(F.relu(part.fc1(x.mean((2, 3)))))))


def _dense_parts() -> dict[str, Any]:
    sizes = [16 + 8 * i for i in range(LAYERS)]
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "norm1": [nn.BatchNorm2d(size) for size in sizes],
        "conv1": [nn.Conv2d(size, 16, 1, bias=False) for size in sizes],
        "norm2": batch_norms(16),
        "conv2": convs(16, 8, bias=False),
        "last": nn.BatchNorm2d(16 + 8 * LAYERS),
        "head": nn.Linear(16 + 8 * LAYERS, 5),
    }


@architecture(
    "DenseNet", IMAGES, _dense_parts,
    torchvision=_lines("stem features.conv0,norm1 features.denseblock1.denselayer{n}.norm1,"
                       "conv1 features.denseblock1.denselayer{n}.conv1,"
                       "norm2 features.denseblock1.denselayer{n}.norm2,"
                       "conv2 features.denseblock1.denselayer{n}.conv2,last features.norm5,head classifier"),
    words=_lines("stem stem,norm1 dense.{i}.bn_squeeze,conv1 dense.{i}.squeeze,norm2 dense.{i}.bn_grow,"
                 "conv2 dense.{i}.grow,last final.bn,head fc"),
)  # fmt: skip
def _dense(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        y = part.conv2[i](F.relu(part.norm2[i](part.conv1[i](F.relu(part.norm1[i](x))))))
        x = torch.cat([x, y], 1)
    return part.head(F.relu(part.last(x)).mean((2, 3)))


def _bottleneck_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "reduce": convs(16, 16, 1, False),
        "spatial": convs(16, 16, 3, False),
        "expand": convs(16, 16, 1, False),
        "shortcut": convs(16, 16, 1, False),
        "head": nn.Linear(16, 5),
        **_normed("norm1", "norm2", "norm3", "norm4"),
    }


@architecture(
    "bottlenecks of equal widths", IMAGES, _bottleneck_parts,
    torchvision=_lines("stem conv1,reduce layers.{i}.conv1,norm1 layers.{i}.bn1,spatial layers.{i}.conv2,"
                       "norm2 layers.{i}.bn2,expand layers.{i}.conv3,norm3 layers.{i}.bn3,"
                       "shortcut layers.{i}.downsample.0,norm4 layers.{i}.downsample.1,head fc"),
    shortcut_first=_lines("stem stem,shortcut stages.{i}.shortcut.conv,norm4 stages.{i}.shortcut.norm,"
                          "reduce stages.{i}.conv_a.conv,norm1 stages.{i}.conv_a.norm,"
                          "spatial stages.{i}.conv_b.conv,norm2 stages.{i}.conv_b.norm,"
                          "expand stages.{i}.conv_c.conv,norm3 stages.{i}.conv_c.norm,head head"),
    MSRA=_lines("stem conv1,reduce res{n}.branch2a,norm1 res{n}.bn2a,spatial res{n}.branch2b,norm2 res{n}.bn2b,"
                "expand res{n}.branch2c,norm3 res{n}.bn2c,shortcut res{n}.branch1,norm4 res{n}.bn1,head fc1000"),
)  # fmt: skip
def _bottleneck(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        y = F.relu(part.norm1[i](part.reduce[i](x)))
        y = part.norm3[i](part.expand[i](F.relu(part.norm2[i](part.spatial[i](y)))))
        x = F.relu(y + part.norm4[i](part.shortcut[i](x)))
    return part.head(x.mean((2, 3)))


# UNets, whose decoders count up or down


def _unet_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "down": convs(16, 16),
        "down_norm": batch_norms(16),
        "middle": nn.Conv2d(16, 16, 3, padding=1),
        "up": convs(32, 16),
        "up_norm": batch_norms(16),
        "head": nn.Conv2d(16, 3, 1),
    }


_UNET = "stem stem,down encoder{n}.conv,down_norm encoder{n}.norm,middle bottleneck,"


@architecture(
    "UNet, in other numbers", IMAGES, _unet_parts,
    from_the_end=_lines(_UNET + "up decoder{r}.conv,up_norm decoder{r}.norm,head conv"),
    ups=_lines("stem inc,down downs.{i}.0,down_norm downs.{i}.1,middle mid,up ups.{i}.0,up_norm ups.{i}.1,head outc"),
    written_backwards=_lines(_UNET.replace("{n}", "{i}") + "up dec{r}.conv,up_norm dec{r}.norm,head final"),
)  # fmt: skip
def _unet(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    skips = []
    for conv, norm in zip(part.down, part.down_norm, strict=True):
        x = F.relu(norm(conv(x)))
        skips.append(x)
    x = part.middle(x)
    for conv, norm in zip(part.up, part.up_norm, strict=True):
        x = F.relu(norm(conv(torch.cat([x, skips.pop()], 1))))
    return part.head(x)


def _pyramid_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "levels": convs(16, 16),
        "lateral": convs(16, 16, 1),
        "smooth": convs(16, 16),
    }


@architecture(
    "feature pyramid", IMAGES, _pyramid_parts,
    torchvision=_lines("stem body.stem,levels body.layer{n},lateral fpn.inner_blocks.{i},"
                       "smooth fpn.layer_blocks.{i}"),
    detectron=_lines("stem bottom_up.stem,levels bottom_up.res{n},lateral fpn_lateral{n},smooth fpn_output{n}"),
    top_down=_lines("smooth neck.smooth{r},lateral neck.lateral{r},stem backbone.stem,levels backbone.stages.{i}"),
)  # fmt: skip
def _pyramid(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    levels = []
    for conv in part.levels:
        x = F.relu(conv(x))
        levels.append(x)
    y = torch.zeros_like(x)
    found = []
    for i in reversed(range(LAYERS)):
        y = y + part.lateral[i](levels[i])
        found.append(part.smooth[i](y))
    return torch.cat(found)


# Two of a kind side by side


def _two_branches() -> dict[str, Any]:
    return {
        "trunk": nn.Linear(HIDDEN, HIDDEN),
        "a": linear(),
        "b": linear(),
        "action": nn.Linear(HIDDEN, 4),
        "value": nn.Linear(HIDDEN, 1),
    }


@architecture(
    "actor and critic", FEATURES, _two_branches,
    actor_critic=_lines("trunk trunk,a actor.{i},action actor.3,b critic.{i},value critic.3"),
    pi_vf=_lines("trunk features,a mlp_extractor.policy_net.{i},b mlp_extractor.value_net.{i},action action_net,"
                 "value value_net"),
    value_first=_lines("trunk shared,b vf.{i},a pi.{i},value vf_out,action pi_out"),
)  # fmt: skip
def _actor_critic(part: Part, x: torch.Tensor) -> torch.Tensor:
    a = b = torch.tanh(part.trunk(x))
    for one, other in zip(part.a, part.b, strict=True):
        a, b = torch.tanh(one(a)), torch.tanh(other(b))
    return torch.cat([part.action(a), part.value(b)], -1)


def _latent_parts() -> dict[str, Any]:
    return {
        "encode": linear(),
        "mean": nn.Linear(HIDDEN, 8),
        "variance": nn.Linear(HIDDEN, 8),
        "widen": nn.Linear(8, HIDDEN),
        "decode": linear(),
    }


@architecture(
    "VAE of vectors", FEATURES, _latent_parts,
    mu=_lines("encode encoder.{i},mean mu,variance logvar,widen from_latent,decode decoder.{i}"),
    foo=_lines("encode encoder.{i},variance foo,mean bar,widen from_latent,decode decoder.{i}"),
    fc=_lines("encode enc.{i},mean fc21,variance fc22,widen fc3,decode dec.{i}"),
    variance_first=_lines("variance fc_logvar,mean fc_mu,encode down.{i},widen expand,decode up.{i}"),
)  # fmt: skip
def _latent(part: Part, x: torch.Tensor) -> torch.Tensor:
    for layer in part.encode:
        x = F.relu(layer(x))
    z = part.mean(x) * torch.exp(part.variance(x).clamp(-2, 2))
    y = part.widen(z)
    for layer in part.decode:
        y = layer(F.relu(y))
    return y


@architecture(
    "siamese towers", FEATURES, lambda: {"a": linear(), "b": linear(), "head": nn.Linear(2 * HIDDEN, 3)},
    query_key=_lines("a encoder_q.{i},b encoder_k.{i},head head"),
    student_teacher=_lines("a student_net.{i},b teacher_net.{i},head fc"),
    online=_lines("b target_encoder.{i},a online_encoder.{i},head predictor"),
    image_text=_lines("a image.{i},b text.{i},head joint"),
)  # fmt: skip
def _towers(part: Part, x: torch.Tensor) -> torch.Tensor:
    a, b = x, x.flip(-1)
    for one, other in zip(part.a, part.b, strict=True):
        a, b = F.relu(one(a)), F.gelu(other(b))
    return part.head(torch.cat([a, b], -1))


@architecture(
    "GAN", FEATURES, lambda: {"g": linear(), "d": linear(), "real": nn.Linear(HIDDEN, 1)},
    letters=_lines("g G.{i},d D.{i},real D.3"),
    words=_lines("d discriminator.layers.{i},real discriminator.out,g generator.layers.{i}"),
    networks=_lines("g netG.main.{i},d netD.main.{i},real netD.head"),
)  # fmt: skip
def _gan(part: Part, x: torch.Tensor) -> torch.Tensor:
    made = x
    for layer in part.g:
        made = F.relu(layer(made))
    y = made
    for layer in part.d:
        y = F.leaky_relu(layer(y))
    return torch.cat([made, part.real(y)], -1)


@architecture(
    "CycleGAN", FEATURES, lambda: {"ab": linear(), "ba": linear()},
    original=_lines("ab netG_A.model.{i},ba netG_B.model.{i}"),
    words=_lines("ba decode.{i},ab encode.{i}"),
    directions=_lines("ab gen_ab.{i},ba gen_ba.{i}"),
)  # fmt: skip
def _cycle(part: Part, x: torch.Tensor) -> torch.Tensor:
    made = x
    for layer in part.ab:
        made = torch.tanh(layer(made))
    back = made
    for layer in part.ba:
        back = F.relu(layer(back))
    return torch.cat([made, back], -1)


@architecture(
    "two critics", FEATURES, lambda: {"a": linear(), "b": linear(), "c": linear()},
    SAC=_lines("c actor.{i},a q1.{i},b q2.{i}"),
    words=_lines("a critic_one.{i},b critic_two.{i},c policy.{i}"),
    list=_lines("a qf.0.{i},b qf.1.{i},c pi.{i}"),
)  # fmt: skip
def _critics(part: Part, x: torch.Tensor) -> torch.Tensor:
    outputs = [x, x, x]
    for layers in zip(part.a, part.b, part.c, strict=True):
        outputs = [torch.tanh(layer(y)) for layer, y in zip(layers, outputs, strict=True)]
    return torch.cat([outputs[0], 2 * outputs[1], 3 * outputs[2]], -1)


def _heads_parts() -> dict[str, Any]:
    return {
        "trunk": linear(),
        "boxes": nn.Linear(HIDDEN, 4),
        "points": nn.Linear(HIDDEN, 4),
        "scores": nn.Linear(HIDDEN, 4),
    }


@architecture(
    "heads of one shape", FEATURES, _heads_parts,
    detection=_lines("trunk trunk.{i},scores cls_head,boxes bbox_head,points kpt_head"),
    words=_lines("trunk body.{i},boxes regression,points landmarks,scores classification"),
    numbers=_lines("trunk layers.{i},boxes heads.0,scores heads.1,points heads.2"),
)  # fmt: skip
def _heads(part: Part, x: torch.Tensor) -> torch.Tensor:
    for layer in part.trunk:
        x = F.relu(layer(x))
    return torch.cat([part.boxes(x), torch.sigmoid(part.points(x)), part.scores(x).softmax(-1)], -1)


# Recurrent cells


def _lstm_parts() -> dict[str, Any]:
    made: dict[str, Any] = {
        "cells": [nn.LSTMCell(HIDDEN, HIDDEN) for _ in range(LAYERS)],
        "input": linear(HIDDEN, 4 * HIDDEN),
        "hidden": linear(HIDDEN, 4 * HIDDEN),
    }
    made |= {"head": nn.Linear(HIDDEN, 5)}
    sizes = {"weight_ih": (4 * HIDDEN, HIDDEN), "weight_hh": (4 * HIDDEN, HIDDEN), "bias_ih": (4 * HIDDEN,)}
    sizes["bias_hh"] = sizes["bias_ih"]
    return made | {name: [nn.Parameter(torch.zeros(size)) for _ in range(LAYERS)] for name, size in sizes.items()}


@architecture(
    "LSTM", TOKENS, _lstm_parts,
    torch=_lines("weight_ih rnn.weight_ih_l{i},weight_hh rnn.weight_hh_l{i},bias_ih rnn.bias_ih_l{i},"
                 "bias_hh rnn.bias_hh_l{i},head fc"),
    cells=_lines("cells cells.{i},head head"),
    layers=_lines("input layers.{i}.x2h,hidden layers.{i}.h2h,head head"),
    hidden_first=_lines("hidden lstm.{i}.recurrent,input lstm.{i}.kernel,head output"),
    W_U=_lines("input layers.{i}.W,hidden layers.{i}.U,head out"),
)  # fmt: skip
def _lstm(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        h = c = torch.zeros(len(x), HIDDEN)
        outputs = []
        for step in x.unbind(1):
            if hasattr(part, "cells"):
                h, c = part.cells[i](step, (h, c))
            else:
                if hasattr(part, "weight_ih"):
                    gates = F.linear(step, part.weight_ih[i], part.bias_ih[i])
                    gates = gates + F.linear(h, part.weight_hh[i], part.bias_hh[i])
                else:
                    gates = part.input[i](step) + part.hidden[i](h)
                into, forget, new, out = gates.chunk(4, -1)
                c = forget.sigmoid() * c + into.sigmoid() * new.tanh()
                h = out.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs, 1)
    return part.head(x)


@architecture(
    "GRU, gate by gate", TOKENS,
    lambda: {role: nn.Linear(HIDDEN, HIDDEN) for role in ("xr", "xz", "xn", "hr", "hz", "hn")},
    torch_like=_lines("xr W_ir,xz W_iz,xn W_in,hr W_hr,hz W_hz,hn W_hn"),
    words=_lines("xz update_x,hz update_h,xr reset_x,hr reset_h,xn new_x,hn new_h"),
    Keras=_lines("xz kernel.z,xr kernel.r,xn kernel.h,hz recurrent.z,hr recurrent.r,hn recurrent.h"),
)  # fmt: skip
def _gru(part: Part, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(len(x), HIDDEN)
    for step in x.unbind(1):
        reset, update = (part.xr(step) + part.hr(h)).sigmoid(), (part.xz(step) + part.hz(h)).sigmoid()
        h = (1 - update) * (part.xn(step) + reset * part.hn(h)).tanh() + update * h
    return h


# Mixers and transformers for images


def _mixer_parts() -> dict[str, Any]:
    return {
        "norm1": layer_norms(),
        "t1": linear(),
        "t2": linear(),
        "norm2": layer_norms(),
        "c1": linear(),
        "c2": linear(),
        "norm": nn.LayerNorm(HIDDEN),
    }


@architecture(
    "MLP-Mixer of equal sizes", values(2, HIDDEN, HIDDEN), _mixer_parts,
    timm=_lines("norm1 blocks.{i}.norm1,t1 blocks.{i}.mlp_tokens.fc1,t2 blocks.{i}.mlp_tokens.fc2,"
                "norm2 blocks.{i}.norm2,c1 blocks.{i}.mlp_channels.fc1,c2 blocks.{i}.mlp_channels.fc2,norm norm"),
    lucidrains=_lines("norm1 layers.{i}.0.norm,t1 layers.{i}.0.fn.0,t2 layers.{i}.0.fn.3,norm2 layers.{i}.1.norm,"
                      "c1 layers.{i}.1.fn.0,c2 layers.{i}.1.fn.3,norm last"),
    Google=_lines("norm1 MixerBlock_{i}.LayerNorm_0,norm2 MixerBlock_{i}.LayerNorm_1,"
                  "c1 MixerBlock_{i}.channel_mixing.Dense_0,c2 MixerBlock_{i}.channel_mixing.Dense_1,"
                  "t1 MixerBlock_{i}.token_mixing.Dense_0,t2 MixerBlock_{i}.token_mixing.Dense_1,"
                  "norm pre_head_layer_norm"),
)  # fmt: skip
def _mixer(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        x = x + part.t2[i](F.gelu(part.t1[i](part.norm1[i](x).mT))).mT
        x = x + part.c2[i](F.gelu(part.c1[i](part.norm2[i](x))))
    return part.norm(x)


def _swin_parts() -> dict[str, Any]:
    return {
        "norm1": layer_norms(),
        "qkv": linear(HIDDEN, 3 * HIDDEN),
        "q": linear(),
        "k": linear(),
        "v": linear(),
        "o": linear(),
        "norm2": layer_norms(),
        "fc1": linear(HIDDEN, 4 * HIDDEN),
        "fc2": linear(4 * HIDDEN, HIDDEN),
        "norm": nn.LayerNorm(HIDDEN),
        "reduction": linear(2 * HIDDEN, HIDDEN, False),
        "merge_norm": layer_norms(2 * HIDDEN),
    }


@architecture(
    "windows and merging", values(2, 32, HIDDEN), _swin_parts,
    Swin=_lines("norm1 layers.{i}.blocks.0.norm1,qkv layers.{i}.blocks.0.attn.qkv,o layers.{i}.blocks.0.attn.proj,"
                "norm2 layers.{i}.blocks.0.norm2,fc1 layers.{i}.blocks.0.mlp.fc1,fc2 layers.{i}.blocks.0.mlp.fc2,"
                "reduction layers.{i}.downsample.reduction,merge_norm layers.{i}.downsample.norm,norm norm"),
    HF=_lines("norm1 encoder.layers.{i}.blocks.0.layernorm_before,"
              "q encoder.layers.{i}.blocks.0.attention.self.query,k encoder.layers.{i}.blocks.0.attention.self.key,"
              "v encoder.layers.{i}.blocks.0.attention.self.value,"
              "o encoder.layers.{i}.blocks.0.attention.output.dense,"
              "norm2 encoder.layers.{i}.blocks.0.layernorm_after,"
              "fc1 encoder.layers.{i}.blocks.0.intermediate.dense,fc2 encoder.layers.{i}.blocks.0.output.dense,"
              "reduction encoder.layers.{i}.downsample.reduction,merge_norm encoder.layers.{i}.downsample.norm,"
              "norm layernorm"),
    torchvision=_lines("norm1 features.{i}.0.norm1,qkv features.{i}.0.attn.qkv,o features.{i}.0.attn.proj,"
                       "norm2 features.{i}.0.norm2,fc1 features.{i}.0.mlp.0,fc2 features.{i}.0.mlp.3,"
                       "reduction features.{i}.1.reduction,merge_norm features.{i}.1.norm,norm norm"),
)  # fmt: skip
def _swin(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        windows = part.norm1[i](x).unflatten(1, (-1, 2)).flatten(0, 1)
        if hasattr(part, "qkv"):
            parts = part.qkv[i](windows).chunk(3, -1)
        else:
            parts = [part.q[i](windows), part.k[i](windows), part.v[i](windows)]
        x = x + part.o[i](attention(*parts)).reshape(x.shape)
        x = x + part.fc2[i](F.gelu(part.fc1[i](part.norm2[i](x))))
        x = part.reduction[i](part.merge_norm[i](x.unflatten(1, (-1, 2)).flatten(2)))
    return part.norm(x)


def _convnext_parts() -> dict[str, Any]:
    return {
        "depthwise": [nn.Conv2d(16, 16, 7, padding=3, groups=16) for _ in range(LAYERS)],
        "norms": layer_norms(16),
        "wide": linear(16, 64),
        "narrow": linear(64, 16),
        "scale": [nn.Parameter(torch.zeros(16)) for _ in range(LAYERS)],
        "stem": nn.Conv2d(3, 16, 4, 4),
        "stem_norm": nn.LayerNorm(16),
        "norm": nn.LayerNorm(16),
        "head": nn.Linear(16, 5),
    }


@architecture(
    "ConvNeXt", IMAGES, _convnext_parts,
    Facebook=_lines("stem downsample_layers.0.0,stem_norm downsample_layers.0.1,scale stages.0.{i}.gamma,"
                    "depthwise stages.0.{i}.dwconv,norms stages.0.{i}.norm,wide stages.0.{i}.pwconv1,"
                    "narrow stages.0.{i}.pwconv2,norm norm,head head"),
    timm=_lines("stem stem.0,stem_norm stem.1,scale stages.0.blocks.{i}.gamma,"
                "depthwise stages.0.blocks.{i}.conv_dw,norms stages.0.blocks.{i}.norm,"
                "wide stages.0.blocks.{i}.mlp.fc1,narrow stages.0.blocks.{i}.mlp.fc2,norm head.norm,head head.fc"),
    torchvision=_lines("stem features.0.0,stem_norm features.0.1,scale features.1.{i}.layer_scale,"
                       "depthwise features.1.{i}.block.0,norms features.1.{i}.block.2,wide features.1.{i}.block.3,"
                       "narrow features.1.{i}.block.5,norm classifier.0,head classifier.2"),
    words=_lines("head out,norm out_norm,depthwise trunk.{i}.spatial,norms trunk.{i}.ln,wide trunk.{i}.grow,"
                 "narrow trunk.{i}.shrink,scale trunk.{i}.layerscale,stem patch,stem_norm patch_norm"),
)  # fmt: skip
def _convnext(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem_norm(part.stem(x).movedim(1, -1))
    for i in range(LAYERS):
        y = part.norms[i](part.depthwise[i](x.movedim(-1, 1)).movedim(1, -1))
        x = x + part.scale[i] * part.narrow[i](F.gelu(part.wide[i](y)))
    return part.head(part.norm(x.mean((1, 2))))


def _squeeze_parts() -> dict[str, Any]:
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "conv": convs(16, 16),
        "norms": batch_norms(16),
        "reduce": convs(16, 4, 1),
        "expand": convs(4, 16, 1),
        "head": nn.Linear(16, 5),
    }


@architecture(
    "squeeze and excitation", IMAGES, _squeeze_parts,
    timm=_lines("stem conv_stem,conv blocks.{i}.conv,norms blocks.{i}.bn,reduce blocks.{i}.se.conv_reduce,"
                "expand blocks.{i}.se.conv_expand,head classifier"),
    torchvision=_lines("stem features.0,conv features.{n}.0.0,norms features.{n}.0.1,reduce features.{n}.1.fc1,"
                       "expand features.{n}.1.fc2,head fc"),
    HF=_lines("stem embeddings.convolution,conv encoder.blocks.{i}.projection.conv,"
              "norms encoder.blocks.{i}.projection.bn,reduce encoder.blocks.{i}.squeeze_excite.reduce,"
              "expand encoder.blocks.{i}.squeeze_excite.expand,head classifier"),
)  # fmt: skip
def _squeeze(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        y = F.relu(part.norms[i](part.conv[i](x)))
        x = x + y * part.expand[i](F.relu(part.reduce[i](y.mean((2, 3), keepdim=True)))).sigmoid()
    return part.head(x.mean((2, 3)))


# State spaces and other sequences


def _mamba_parts() -> dict[str, Any]:
    return {
        "norms": [nn.RMSNorm(HIDDEN, 1e-5) for _ in range(LAYERS)],
        "into": linear(HIDDEN, 2 * HIDDEN, False),
        "conv": [nn.Conv1d(HIDDEN, HIDDEN, 4, padding=3, groups=HIDDEN) for _ in range(LAYERS)],
        "states": linear(HIDDEN, 4 + 16, False),
        "steps": linear(4, HIDDEN),
        "out": linear(bias=False),
        "decay": [nn.Parameter(torch.zeros(HIDDEN, 8)) for _ in range(LAYERS)],
        "skip": [nn.Parameter(torch.zeros(HIDDEN)) for _ in range(LAYERS)],
        "norm": nn.RMSNorm(HIDDEN, 1e-5),
    }


@architecture(
    "Mamba", TOKENS, _mamba_parts,
    original=_lines("decay backbone.layers.{i}.mixer.A_log,skip backbone.layers.{i}.mixer.D,"
                    "into backbone.layers.{i}.mixer.in_proj,conv backbone.layers.{i}.mixer.conv1d,"
                    "states backbone.layers.{i}.mixer.x_proj,steps backbone.layers.{i}.mixer.dt_proj,"
                    "out backbone.layers.{i}.mixer.out_proj,norms backbone.layers.{i}.norm,norm backbone.norm_f"),
    words=_lines("norms blocks.{i}.ln,into blocks.{i}.ssm.input,conv blocks.{i}.ssm.depthwise,"
                 "states blocks.{i}.ssm.select,steps blocks.{i}.ssm.delta,decay blocks.{i}.ssm.log_a,"
                 "skip blocks.{i}.ssm.skip,out blocks.{i}.ssm.output,norm ln"),
)  # fmt: skip
def _mamba(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        u, gate = part.into[i](part.norms[i](x)).chunk(2, -1)
        u = F.silu(part.conv[i](u.mT)[..., : x.shape[1]].mT)
        step, into, out = part.states[i](u).split((4, 8, 8), -1)
        step = F.softplus(part.steps[i](step))
        state = torch.zeros(len(x), HIDDEN, 8)
        outputs = []
        for t in range(x.shape[1]):
            decay = torch.exp(-part.decay[i].exp() * step[:, t, :, None])
            state = decay * state + (step[:, t] * u[:, t])[..., None] * into[:, t, None]
            outputs.append((state * out[:, t, None]).sum(-1) + part.skip[i] * u[:, t])
        x = x + part.out[i](torch.stack(outputs, 1) * F.silu(gate))
    return part.norm(x)


def _rwkv_parts() -> dict[str, Any]:
    return {
        "norm1": layer_norms(),
        "norm2": layer_norms(),
        **{f"t{name}": linear(bias=False) for name in "krvo"},
        **{f"c{name}": linear(bias=False) for name in "krv"},
    }


@architecture(
    "RWKV-like", TOKENS, _rwkv_parts,
    original=_lines("norm1 blocks.{i}.ln1,norm2 blocks.{i}.ln2,tk blocks.{i}.att.key,tv blocks.{i}.att.value,"
                    "tr blocks.{i}.att.receptance,to blocks.{i}.att.output,ck blocks.{i}.ffn.key,"
                    "cr blocks.{i}.ffn.receptance,cv blocks.{i}.ffn.value"),
    HF=_lines("norm1 rwkv.blocks.{i}.ln1,norm2 rwkv.blocks.{i}.ln2,tk rwkv.blocks.{i}.attention.key,"
              "tv rwkv.blocks.{i}.attention.value,tr rwkv.blocks.{i}.attention.receptance,"
              "to rwkv.blocks.{i}.attention.output,ck rwkv.blocks.{i}.feed_forward.key,"
              "cr rwkv.blocks.{i}.feed_forward.receptance,cv rwkv.blocks.{i}.feed_forward.value"),
    words=_lines("norm1 h.{i}.n1,tr h.{i}.time.r,tk h.{i}.time.k,tv h.{i}.time.v,to h.{i}.time.o,norm2 h.{i}.n2,"
                 "cr h.{i}.channel.r,ck h.{i}.channel.k,cv h.{i}.channel.v"),
)  # fmt: skip
def _rwkv(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        y = part.norm1[i](x)
        mixed = (part.tk[i](y).exp() * part.tv[i](y)).cumsum(1) / part.tk[i](y).exp().cumsum(1)
        x = x + part.to[i](part.tr[i](y).sigmoid() * mixed)
        y = part.norm2[i](x)
        x = x + part.cr[i](y).sigmoid() * part.cv[i](F.relu(part.ck[i](y)) ** 2)
    return x


def _wavenet_parts() -> dict[str, Any]:
    pointwise = {name: [nn.Conv1d(16, 16, 1) for _ in range(LAYERS)] for name in ("residual", "skips")}
    gates = {
        name: [nn.Conv1d(16, 16, 3, padding=2**i, dilation=2**i) for i in range(LAYERS)] for name in ("filter", "gate")
    }
    return {"stem": nn.Conv1d(8, 16, 1), **gates, **pointwise, "last": nn.Conv1d(16, 8, 1)}


@architecture(
    "WaveNet", values(2, 8, 20), _wavenet_parts,
    lists=_lines("filter filter_convs.{i},gate gate_convs.{i},residual residual_convs.{i},skips skip_convs.{i},"
                 "stem start_conv,last end_conv"),
    blocks=_lines("stem first,gate blocks.{i}.conv_gate,filter blocks.{i}.conv_filter,skips blocks.{i}.conv_skip,"
                  "residual blocks.{i}.conv_res,last last"),
    words=_lines("stem input,filter stack.{i}.tanh,gate stack.{i}.sigmoid,residual stack.{i}.one,"
                 "skips stack.{i}.two,last output"),
)  # fmt: skip
def _wavenet(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    total = torch.zeros_like(x)
    for i in range(LAYERS):
        y = part.filter[i](x).tanh() * part.gate[i](x).sigmoid()
        total = total + part.skips[i](y)
        x = x + part.residual[i](y)
    return part.last(F.relu(total))


# Gated feed-forwards, experts and attentions in other words


def _gated_parts() -> dict[str, Any]:
    return {
        "norms": layer_norms(),
        "gate": linear(HIDDEN, 48, False),
        "up": linear(HIDDEN, 48, False),
        "down": linear(48, HIDDEN, False),
    }


_GLU = "norms layers.{{i}}.norm,gate layers.{{i}}.{},up layers.{{i}}.{},down layers.{{i}}.{}"


@architecture(
    "gated feed-forward", TOKENS, _gated_parts,
    proj=_lines(_GLU.format("gate_proj", "up_proj", "down_proj")),
    w_gate=_lines(_GLU.format("w_gate", "w_up", "w_down").replace("layers", "blocks")),
    wi=_lines(_GLU.format("wi_0", "wi_1", "wo")),
    w123=_lines("norms layers.{i}.norm,gate layers.{i}.w1,down layers.{i}.w2,up layers.{i}.w3"),
    fc=_lines(_GLU.format("fc_1", "fc_2", "proj").replace("layers", "h")),
    Qwen=_lines(_GLU.format("w2", "w1", "c_proj").replace("layers", "h")),
    up_first=_lines("norms h.{i}.norm,up h.{i}.fc1,gate h.{i}.fc_gate,down h.{i}.fc2"),
    xformers=_lines(_GLU.format("value_gate", "value", "out").replace("layers", "stack")),
)  # fmt: skip
def _gated(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        y = part.norms[i](x)
        x = x + part.down[i](F.silu(part.gate[i](y)) * part.up[i](y))
    return x


def _expert_parts() -> dict[str, Any]:
    made: dict[str, Any] = {"router": nn.Linear(HIDDEN, LAYERS, False), "shared": nn.Linear(HIDDEN, HIDDEN)}
    return made | {"wide": linear(HIDDEN, 48), "narrow": linear(48, HIDDEN), "after": linear()}


@architecture(
    "mixture of experts", TOKENS, _expert_parts,
    gate=_lines("router gate,wide experts.{i}.w1,narrow experts.{i}.w2,shared shared_expert,after post.{i}"),
    router=_lines("wide moe.experts.{i}.fc1,narrow moe.experts.{i}.fc2,router moe.router,shared moe.common,"
                  "after tail.{i}"),
    letters=_lines("router route,wide a.{i},narrow b.{i},after c.{i},shared d"),
)  # fmt: skip
def _experts(part: Part, x: torch.Tensor) -> torch.Tensor:
    weights = part.router(x).softmax(-1)
    x = part.shared(x) + sum(weights[..., i : i + 1] * part.narrow[i](F.gelu(part.wide[i](x))) for i in range(LAYERS))
    for layer in part.after:
        x = torch.tanh(layer(x))
    return x


def _cross_parts() -> dict[str, Any]:
    return {
        "norms": layer_norms(),
        "q": linear(bias=False),
        "k": linear(bias=False),
        "v": linear(bias=False),
        "o": linear(),
        "context": nn.Linear(HIDDEN, HIDDEN),
        "kv": linear(HIDDEN, 2 * HIDDEN, False),
    }


_CROSS = (
    "context context,norms layers.{{i}}.norm,q layers.{{i}}.{0}q,k layers.{{i}}.{0}k,v layers.{{i}}.{0}v,"
    "o layers.{{i}}.{1}"
)


@architecture(
    "cross-attention", TOKENS, _cross_parts,
    to_q=_lines(_CROSS.format("to_", "to_out.0")),
    q=_lines(_CROSS.format("", "proj").replace("layers", "blocks")),
    w_q=_lines(_CROSS.format("w_", "fc").replace("layers", "stack")),
    words=_lines("context memory,v h.{i}.values,k h.{i}.keys,q h.{i}.queries,o h.{i}.unify,norms h.{i}.ln"),
    kv=_lines("context context,norms b.{i}.norm,q b.{i}.to_q,kv b.{i}.to_kv,o b.{i}.to_out"),
    theta=_lines("context g,q nl.{i}.theta,k nl.{i}.phi,v nl.{i}.g,o nl.{i}.W,norms nl.{i}.norm"),
)  # fmt: skip
def _cross(part: Part, x: torch.Tensor) -> torch.Tensor:
    memory = part.context(x.flip(1))
    for i in range(LAYERS):
        query = part.q[i](part.norms[i](x))
        key, value = part.kv[i](memory).chunk(2, -1) if hasattr(part, "kv") else (part.k[i](memory), part.v[i](memory))
        x = x + part.o[i](attention(query, key, value))
    return x


@architecture(
    "bilinear attention with one head", FEATURES,
    lambda: {r: nn.Linear(HIDDEN, HIDDEN) for r in ("a", "b", "c", "d")},
    additive=_lines("a W1,b W2,c V,d out"),
    words=_lines("b memory_layer,a query_layer,c v,d projection"),
    letters=_lines("a one,b two,c three,d four"),
)  # fmt: skip
def _bilinear(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.d(part.c((part.a(x) + 2 * part.b(x.flip(0))).tanh()).relu())


# Plain perceptrons and encoders of several inputs


@architecture(
    "perceptron of equal widths", FEATURES, lambda: {"a": linear(), "b": linear(), "head": nn.Linear(HIDDEN, 5)},
    net=_lines("a net.{i},b net2.{i},head out"),
    numbers=_lines("a fc{n},b dense{n},head fc9"),
    backwards=_lines("head head,b second.{i},a first.{i}"),
)  # fmt: skip
def _perceptron(part: Part, x: torch.Tensor) -> torch.Tensor:
    for layer in (*part.a, *part.b):
        x = x + torch.tanh(layer(x))
    return part.head(x)


@architecture(
    "autoencoder", FEATURES, lambda: {"down": linear(), "up": linear(), "code": nn.Linear(HIDDEN, HIDDEN)},
    words=_lines("down encoder.{i},code bottleneck,up decoder.{i}"),
    mirrored=_lines("down enc{n},code code,up dec{r}"),
    decoder_first=_lines("up decode.{i},down encode.{i},code latent"),
)  # fmt: skip
def _autoencoder(part: Part, x: torch.Tensor) -> torch.Tensor:
    for layer in (*part.down, part.code, *part.up):
        x = torch.tanh(layer(x))
    return x


def _embedding_parts() -> dict[str, Any]:
    return {name: nn.Embedding(16, HIDDEN) for name in ("users", "items", "user_bias", "item_bias")} | {"mix": linear()}


@architecture(
    "matrix factorization", torch.arange(8).reshape(4, 2), _embedding_parts,
    words=_lines("users user_embedding,items item_embedding,user_bias user_factors,item_bias item_factors,"
                 "mix mlp.{i}"),
    NCF=_lines("users embed_user_GMF,items embed_item_GMF,user_bias embed_user_MLP,item_bias embed_item_MLP,"
               "mix MLP_layers.{i}"),
    letters=_lines("items V,users U,item_bias B,user_bias A,mix h.{i}"),
)  # fmt: skip
def _factors(part: Part, ids: torch.Tensor) -> torch.Tensor:
    x = part.users(ids[:, 0]) * part.items(ids[:, 1]) + part.user_bias(ids[:, 0]) - part.item_bias(ids[:, 1])
    for layer in part.mix:
        x = torch.tanh(layer(x))
    return x


@architecture(
    "graph network", FEATURES, lambda: {"own": linear(), "others": linear(bias=False), "norms": layer_norms()},
    SAGE=_lines("own convs.{i}.lin_r,others convs.{i}.lin_l,norms norms.{i}"),
    DGL=_lines("others layers.{i}.fc_neigh,own layers.{i}.fc_self,norms layers.{i}.norm"),
    words=_lines("own gnn.{i}.root,others gnn.{i}.message,norms bn.{i}"),
)  # fmt: skip
def _graph(part: Part, x: torch.Tensor) -> torch.Tensor:
    for i in range(LAYERS):
        x = F.relu(part.norms[i](part.own[i](x) + part.others[i](x.mean(0, keepdim=True).expand_as(x))))
    return x


def _depthwise_parts() -> dict[str, Any]:
    depthwise = [nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False) for _ in range(LAYERS)]
    return {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "depthwise": depthwise,
        "pointwise": convs(16, 16, 1, False),
        **_normed("norm1", "norm2"),
        "head": nn.Linear(16, 5),
    }


@architecture(
    "MobileNet", IMAGES, _depthwise_parts,
    sequential=_lines("stem model.0,depthwise model.{n}.0,norm1 model.{n}.1,pointwise model.{n}.3,"
                      "norm2 model.{n}.4,head fc"),
    words=_lines("stem stem,depthwise blocks.{i}.dw.conv,norm1 blocks.{i}.dw.bn,pointwise blocks.{i}.pw.conv,"
                 "norm2 blocks.{i}.pw.bn,head head"),
    norms_last=_lines("stem first,depthwise cells.{i}.depthwise,pointwise cells.{i}.pointwise,norm1 cells.{i}.bn_d,"
                      "norm2 cells.{i}.bn_p,head classifier"),
)  # fmt: skip
def _mobile(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        x = F.relu(part.norm2[i](part.pointwise[i](F.relu(part.norm1[i](part.depthwise[i](x))))))
    return part.head(x.mean((2, 3)))


@architecture(
    "inception with equal branches", IMAGES,
    lambda: {"stem": nn.Conv2d(3, 16, 3, padding=1), **{f"b{n}": convs(16, 16) for n in range(4)}},
    branches=_lines("stem stem,b0 blocks.{i}.branch1,b1 blocks.{i}.branch2,b2 blocks.{i}.branch3,"
                    "b3 blocks.{i}.branch4"),
    words=_lines("stem entry,b3 cells.{i}.pool,b0 cells.{i}.one,b2 cells.{i}.five,b1 cells.{i}.three"),
    numbers=_lines("stem stem,b0 cells.{i}.0,b1 cells.{i}.1,b2 cells.{i}.2,b3 cells.{i}.3"),
)  # fmt: skip
def _inception(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        branches = [F.relu(branch[i](x)) for branch in (part.b0, part.b1, part.b2, part.b3)]
        x = x + branches[0] * branches[1].sigmoid() - branches[2] * 2 + branches[3].tanh()
    return x.mean((2, 3))


@architecture(
    "two streams", IMAGES,
    lambda: {"color": convs(3, 3), "flow": convs(3, 3), "color_norm": batch_norms(3), "flow_norm": batch_norms(3)},
    words=_lines("color rgb.{i}.conv,color_norm rgb.{i}.bn,flow flow.{i}.conv,flow_norm flow.{i}.bn"),
    fast_slow=_lines("flow fast.{i}.conv,flow_norm fast.{i}.bn,color slow.{i}.conv,color_norm slow.{i}.bn"),
    streams=_lines("color spatial_stream.{i}.conv,color_norm spatial_stream.{i}.norm,flow temporal_stream.{i}.conv,"
                   "flow_norm temporal_stream.{i}.norm"),
)  # fmt: skip
def _streams(part: Part, x: torch.Tensor) -> torch.Tensor:
    a, b = x, x.flip(1)
    for i in range(LAYERS):
        a, b = F.relu(part.color_norm[i](part.color[i](a))), torch.tanh(part.flow_norm[i](part.flow[i](b)))
    return torch.cat([a, b], 1)


@architecture(
    "conditional norms", IMAGES,
    lambda: {"stem": nn.Conv2d(3, 16, 3, padding=1), "conv": convs(16, 16), "scale": linear(16, 16),
             "shift": linear(16, 16),
             "style": nn.Linear(16, 16)},
    FiLM=_lines("stem stem,style embed,conv blocks.{i}.conv,scale blocks.{i}.film_gamma,shift blocks.{i}.film_beta"),
    AdaIN=_lines("style mapping,stem input,shift layers.{i}.to_shift,scale layers.{i}.to_scale,conv layers.{i}.conv"),
    SPADE=_lines("stem first,style cond,conv up.{i}.conv_0,scale up.{i}.mlp_gamma,shift up.{i}.mlp_beta"),
)  # fmt: skip
def _conditional(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    style = part.style(x.mean((2, 3)))
    for i in range(LAYERS):
        y = (
            part.conv[i](F.relu(x)) * (1 + part.scale[i](style)[..., None, None])
            + part.shift[i](style)[..., None, None]
        )
        x = x + y
    return x.mean((2, 3))


@architecture(
    "positions and tokens", TOKENS,
    lambda: {"cls": nn.Parameter(torch.zeros(1, 1, HIDDEN)), "distilled": nn.Parameter(torch.zeros(1, 1, HIDDEN)),
             "positions": nn.Parameter(torch.zeros(1, 9, HIDDEN)), "layers": linear(), "a": nn.Linear(HIDDEN, 4),
             "b": nn.Linear(HIDDEN, 4)},
    timm=_lines("cls cls_token,distilled dist_token,positions pos_embed,layers blocks.{i},a head,b head_dist"),
    HF=_lines("cls embeddings.cls_token,distilled embeddings.distillation_token,"
              "positions embeddings.position_embeddings,layers encoder.{i},a cls_classifier,"
              "b distillation_classifier"),
    words=_lines("positions positional,distilled extra,cls token,layers body.{i},b second,a first"),
)  # fmt: skip
def _tokens(part: Part, x: torch.Tensor) -> torch.Tensor:
    ones = (part.cls.expand(len(x), 1, -1), part.distilled.expand(len(x), 1, -1))
    x = torch.cat([*ones, x], 1) + part.positions
    for layer in part.layers:
        x = torch.tanh(layer(x)).cumsum(1)
    return torch.cat([part.a(x[:, 0]), part.b(x[:, 1])], -1) + part.a(x[:, 2:].mean(1)).repeat(1, 2)


# What is numbered in another way on either side


def _own_laterals_parts() -> dict[str, Any]:
    made: dict[str, Any] = {"stem": nn.Conv2d(3, 8, 3, padding=1)}
    for level, size in enumerate((8, 12, 20)):
        made[f"lateral{level}"] = nn.Conv2d(size, 16, 1)
        made[f"smooth{level}"] = nn.Conv2d(16, 16, 3, padding=1)
    return made | {"down": [nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 20, 3, padding=1)]}


@architecture(
    "feature pyramid, laterals of their own sizes", IMAGES, _own_laterals_parts,
    from_the_coarsest=_lines("stem conv1,down layer{n},smooth2 smooth1,smooth1 smooth2,smooth0 smooth3,"
                             "lateral2 latlayer1,lateral1 latlayer2,lateral0 latlayer3"),
    lists=_lines("stem stem,down body.{i},lateral0 lateral_convs.0,lateral1 lateral_convs.1,lateral2 lateral_convs.2,"
                 "smooth0 fpn_convs.0,smooth1 fpn_convs.1,smooth2 fpn_convs.2"),
    detectron=_lines("lateral0 fpn_lateral2,smooth0 fpn_output2,lateral1 fpn_lateral3,smooth1 fpn_output3,"
                     "lateral2 fpn_lateral4,smooth2 fpn_output4,stem bottom_up.stem,down bottom_up.res{n}"),
)  # fmt: skip
def _own_laterals(part: Part, x: torch.Tensor) -> torch.Tensor:
    levels = [part.stem(x)]
    for conv in part.down:
        levels.append(F.relu(conv(levels[-1])))
    y = part.lateral2(levels[2])
    found = [part.smooth2(y)]
    for level, lateral, smooth in ((1, part.lateral1, part.smooth1), (0, part.lateral0, part.smooth0)):
        y = torch.tanh(y) + lateral(levels[level])
        found.append(smooth(y))
    return torch.cat(found)


@architecture(
    "two convolutions of each block", IMAGES,
    lambda: {"stem": nn.Conv2d(3, 16, 3, padding=1), "first": convs(16, 16), "second": convs(16, 16)},
    lists=_lines("stem conv_pre,first convs1.{i},second convs2.{i}"),
    blocks=_lines("stem stem,first layers.{i}.conv1,second layers.{i}.conv2"),
    sequential=_lines("stem head,first blocks.{i}.0,second blocks.{i}.2"),
    other_lists=_lines("stem pre,second conv2.{i},first conv1.{i}"),
)  # fmt: skip
def _two_convolutions(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for first, second in zip(part.first, part.second, strict=True):
        x = x + second(F.leaky_relu(first(F.relu(x))))
    return x


def _split_parts() -> dict[str, Any]:
    halves = {half: nn.Conv2d(24, 12, 1, bias=False) for half in ("long", "short")}
    return {"stem": nn.Conv2d(3, 24, 3, padding=1), **halves, "last": nn.Conv2d(24, 24, 1), "inner": convs(12, 12)}


@architecture(
    "halves of a split", IMAGES, _split_parts,
    long_first=_lines("stem stem,long cv1.conv,short cv2.conv,last cv3.conv,inner m.{i}.conv"),
    short_first=_lines("stem first,short split_conv0.conv,long split_conv1.conv,inner blocks.{i}.conv,"
                       "last concat.conv"),
    words=_lines("stem entry,long main_conv.conv,short short_conv.conv,last final_conv.conv,"
                 "inner blocks.{i}.conv"),
)  # fmt: skip
def _split(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    y = part.long(x)
    for conv in part.inner:
        y = y + F.silu(conv(y))
    return part.last(torch.cat([y, part.short(x)], 1))


@architecture(
    "decoders of one word", IMAGES, _unet_parts,
    rising=_lines("stem conv_in,down enc{n}.conv,down_norm enc{n}.norm,middle mid,up dec{n}.conv,up_norm dec{n}.norm,"
                  "head conv_out"),
    falling=_lines("stem inc,down encoder{n}.c,down_norm encoder{n}.n,middle bottom,up dec{r}.c,up_norm dec{r}.n,"
                   "head outc"),
    upconv=_lines("stem first,down e{n}.block,down_norm e{n}.bn,middle center,up upconv{r}.block,up_norm upconv{r}.bn,"
                  "head last"),
    lists=_lines("stem s,down encoder.{i}.0,down_norm encoder.{i}.1,middle m,up decoder.{i}.0,up_norm decoder.{i}.1,"
                 "head h"),
)  # fmt: skip
def _one_word(part: Part, x: torch.Tensor) -> torch.Tensor:
    return _unet(part, x)


def _twin_parts() -> dict[str, Any]:
    sizes = {"1": (HIDDEN, 16), "2": (16, 16), "3": (16, 1)}
    return {f"{twin}{layer}": nn.Linear(*size) for twin in "ab" for layer, size in sizes.items()}


@architecture(
    "twins in lists", FEATURES, _twin_parts,
    by_layer=_lines("a1 layers.0.0,b1 layers.0.1,a2 layers.1.0,b2 layers.1.1,a3 layers.2.0,b3 layers.2.1"),
    by_twin=_lines("a1 nets.0.0,a2 nets.0.1,a3 nets.0.2,b1 nets.1.0,b2 nets.1.1,b3 nets.1.2"),
    words=_lines("a1 q1.fc1,a2 q1.fc2,a3 q1.fc3,b1 q2.fc1,b2 q2.fc2,b3 q2.fc3"),
)  # fmt: skip
def _twins(part: Part, x: torch.Tensor) -> torch.Tensor:
    one = part.a3(torch.tanh(part.a2(torch.tanh(part.a1(x)))))
    return torch.cat([one, part.b3(F.relu(part.b2(F.relu(part.b1(x)))))], -1)


@architecture(
    "gated feed-forward with one named", TOKENS, _gated_parts,
    gate_named=_lines("norms b.{i}.norm,gate b.{i}.gate,up b.{i}.fc1,down b.{i}.fc2"),
    v_between=_lines("norms h.{i}.norm,gate h.{i}.mlp.w1,up h.{i}.mlp.v1,down h.{i}.mlp.w2"),
)  # fmt: skip
def _one_named(part: Part, x: torch.Tensor) -> torch.Tensor:
    return _gated(part, x)


@architecture(
    "layers counted with the first", FEATURES,
    lambda: {"stem": nn.Linear(HIDDEN, 16), "a": linear(16, 16), "b": linear(16, 16), "head": nn.Linear(16, 5)},
    apart=_lines("stem stem,a enc.{i},b dec.{i},head head"),
    together=_lines("stem enc.0,a enc.{n},b dec.{i},head dec.3"),
    others=_lines("stem inp,a encoder.{n},b decoder.{n},head out"),
)  # fmt: skip
def _with_the_first(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for layer in (*part.a, *part.b):
        x = x + torch.tanh(layer(x))
    return part.head(x)


# What sizes without ones, ordinals, flat numbers and lists do not say


def _asymmetric_parts() -> dict[str, Any]:
    sizes = {"rows": (1, 7), "columns": (7, 1)}
    kernels = {
        role: [nn.Conv2d(16, 16, size, padding=(size[0] // 2, size[1] // 2)) for _ in range(LAYERS)]
        for role, size in sizes.items()
    }
    return {"stem": nn.Conv2d(3, 16, 3, padding=1), **kernels, "head": nn.Linear(16, 5)}


@architecture(
    "convolutions of rows and columns", IMAGES, _asymmetric_parts,
    rows_first=_lines("stem stem,rows b.{i}.conv_1,columns b.{i}.conv_2,head fc"),
    columns_first=_lines("stem inp,columns m.{i}.conv_1,rows m.{i}.conv_2,head out"),
    letters=_lines("stem stem,columns b.{i}.conv_a,rows b.{i}.conv_b,head head"),
    sequential=_lines("stem layers.0,columns layers.{n}.0,rows layers.{n}.1,head out"),
)  # fmt: skip
def _asymmetric(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        x = x + 0.3 * part.columns[i](F.relu(part.rows[i](x)))
    return part.head(x.mean((2, 3)))


def _three_norms_parts() -> dict[str, Any]:
    roles = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o")
    norms = {f"norm{n}": layer_norms() for n in (1, 2, 3)}
    return {**norms, **{role: linear() for role in roles}, "wide": linear(HIDDEN, 48), "narrow": linear(48, HIDDEN)}


def _three_norms_names(own: str, cross: str, parts: str, wide: str, narrow: str, norms: str) -> str:
    names = [
        f"{side}{role} h.{{i}}.{path}.{name}"
        for side, path in (("", own), ("cross_", cross))
        for role, name in zip("qkvo", parts.split(), strict=True)
    ]
    names += [f"wide h.{{i}}.{wide}", f"narrow h.{{i}}.{narrow}"]
    return "\n".join([*names, *(f"norm{n} h.{{i}}.{norm}" for n, norm in enumerate(norms.split(), 1))])


@architecture(
    "decoders with a norm of the cross-attention", TOKENS, _three_norms_parts,
    last=_three_norms_names("attn", "cross", "query key value out", "mlp.fc1", "mlp.fc2", "norm1 norm2 final_norm"),
    between=_three_norms_names("self_attn", "cross_attn", "to_q to_k to_v to_out", "mlp.0", "mlp.2",
                               "norm1 cross_norm norm2"),
    fairseq=_three_norms_names("self_attn", "encoder_attn", "q_proj k_proj v_proj out_proj", "fc1", "fc2",
                               "self_attn_layer_norm encoder_attn_layer_norm final_layer_norm"),
)  # fmt: skip
def _three_norms(part: Part, x: torch.Tensor) -> torch.Tensor:
    memory = x.flip(1)
    for i in range(LAYERS):
        y = part.norm1[i](x)
        x = x + part.o[i](attention(part.q[i](y), part.k[i](y), part.v[i](y)))
        y = part.norm2[i](x)
        x = x + part.cross_o[i](attention(part.cross_q[i](y), part.cross_k[i](memory), part.cross_v[i](memory)))
        x = x + part.narrow[i](F.gelu(part.wide[i](part.norm3[i](x))))
    return x


def _vocoder_parts() -> dict[str, Any]:
    made: dict[str, Any] = {"stem": nn.Conv1d(8, 16, 7, padding=3), "last": nn.Conv1d(16, 1, 7, padding=3)}
    for size in (3, 5):
        made[f"dilated{size}"] = [nn.Conv1d(16, 16, size, padding="same", dilation=i + 1) for i in range(LAYERS)]
        made[f"plain{size}"] = [nn.Conv1d(16, 16, size, padding="same") for _ in range(LAYERS)]
    return made


@architecture(
    "two lists of three in each block, or three of two", values(2, 8, 20), _vocoder_parts,
    lists=_lines("stem conv_pre,dilated3 resblocks.0.convs1.{i},plain3 resblocks.0.convs2.{i},"
                 "dilated5 resblocks.1.convs1.{i},plain5 resblocks.1.convs2.{i},last conv_post"),
    pairs=_lines("stem first,dilated3 mrf.0.{i}.0,plain3 mrf.0.{i}.1,dilated5 mrf.1.{i}.0,plain5 mrf.1.{i}.1,"
                 "last last"),
)  # fmt: skip
def _vocoder(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    found = torch.zeros_like(x)
    for dilated, plain in ((part.dilated3, part.plain3), (part.dilated5, part.plain5)):
        y = x
        for one, other in zip(dilated, plain, strict=True):
            y = y + other(F.leaky_relu(one(F.leaky_relu(y))))
        found = found + y
    return part.last(found)


@architecture(
    "decoders of equal widths in lists", FEATURES, lambda: {"down": linear(HIDDEN, 24), "up": linear(24, HIDDEN)},
    in_order_of_use=_lines("down down.{i},up up.{i}"),
    by_level=_lines("down downs.{i},up ups.{r}"),
    numbers=_lines("down layer{n},up uplayer{n}"),
)  # fmt: skip
def _levels(part: Part, x: torch.Tensor) -> torch.Tensor:
    codes = []
    for layer in part.down:
        codes.append(torch.tanh(layer(x)))
        x = F.pad(codes[-1], (0, HIDDEN - 24))
    for layer, code in zip(part.up, reversed(codes), strict=True):
        x = torch.tanh(layer(code)) + 0.5 * x
    return x
