"""Tables of the package, with names as long as those of transformers' models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_tricks import align
from lightning_tricks.flops.core.flops_count import FlopsCount, FlopsRow
from lightning_tricks.model_report.core.report_summary import ModelMemory, ModelReportSummary, ParameterRow

_MIB = 2**20
# As transformers' BertForSequenceClassification names its parameters, and how large they are
_LAYER = "bert.encoder.layer.11"
NAMES = {
    "bert.embeddings.word_embeddings.weight": (30522, 768),
    "bert.embeddings.token_type_embeddings.weight": (2, 768),
    "bert.embeddings.LayerNorm.weight": (768,),
    f"{_LAYER}.attention.self.query.weight": (768, 768),
    f"{_LAYER}.attention.self.query.bias": (768,),
    f"{_LAYER}.attention.output.LayerNorm.weight": (768,),
    f"{_LAYER}.intermediate.dense.weight": (3072, 768),
    f"{_LAYER}.output.dense.bias": (768,),
    "bert.pooler.dense.weight": (768, 768),
    "classifier.weight": (2, 768),
}


def _size(name: str) -> int:
    return torch.Size(NAMES[name]).numel()


def flops(peer: bool = False) -> FlopsCount:
    """Return the counts of the modules, not those of a real call."""
    kinds = {
        "": "BertForSequenceClassification",
        "bert": "BertModel",
        "bert.embeddings": "BertEmbeddings",
        "bert.embeddings.token_type_embeddings": "Embedding",
        "bert.encoder": "BertEncoder",
        f"{_LAYER}.attention.self": "BertSdpaSelfAttention",
        f"{_LAYER}.attention.self.query": "Linear",
        f"{_LAYER}.intermediate.intermediate_act_fn": "GELUActivation",
        "classifier": "Linear",
    }
    rows = []
    for name, kind in kinds.items():
        params = sum(_size(each) for each in NAMES if each.startswith(name))
        cost = {"macs": 32 * params, "flops": 64 * params, "other_flops": 5 * params, "share": params / 27_425_280}
        shapes = {"input_shapes": ((32, 128, 768),), "output_shapes": ((32, 128, 768), (32, 768), (32, 2))}
        trains = 0 if "embeddings" in name else params
        rows.append(FlopsRow(name, kind, params, trains, calls=1, **cost, **shapes))
    totals = {"macs": rows[0].macs, "flops": rows[0].flops, "other_flops": rows[0].other_flops}
    params = {"params": rows[0].params, "trainable_params": rows[0].trainable_params}
    other = replace(flops(), backend="thop") if peer else None
    return FlopsCount(**totals, **params, train_step_flops=None, uncounted={}, rows=tuple(rows), peer=other)


def parameters() -> ModelReportSummary:
    """Return the report of a model that is not there."""
    rows = [
        ParameterRow(name, shape, "bfloat16", "embeddings" not in name, -4.06e-05 * index, 0.0199, 0.000123 * index)
        for index, (name, shape) in enumerate(NAMES.items())
    ]
    memory = ModelMemory(438 * _MIB, 4096, 438 * _MIB, 876 * _MIB)
    return ModelReportSummary("BertForSequenceClassification", tuple(rows), memory, None, None, ())


def alignment() -> Any:
    """Return the report of a file of another project."""
    shapes = {name: torch.empty(*shape, device="meta") for name, shape in NAMES.items()}
    model = {f"text_encoder.{name.replace('self.query', 'self_attn.q_proj')}": value for name, value in shapes.items()}
    module = nn.Module()
    for name, value in model.items():
        *path, leaf = name.split(".")
        parent = module
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(leaf, nn.Parameter(value))
    del shapes["bert.pooler.dense.weight"]
    shapes["classifier.weight"] = torch.empty(1000, 768, device="meta")
    return align(module, shapes | {"cls.predictions.transform.LayerNorm.weight": torch.empty(768, 3)}).report()


TABLES: dict[str, Callable[[], Any]] = {
    "alignment": alignment,
    "flops": flops,
    "flops_compared": lambda: flops(peer=True).table(depth=None),
    "parameters": parameters,
}
