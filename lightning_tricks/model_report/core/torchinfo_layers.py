"""The layers of a model, as torchinfo summarizes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.dry_run.model_call import ModelCall
from lightning_tricks._shared.dry_run.trainer_stub import redirect_backward, run_backward

# torchinfo's estimates of FLOPs and sizes
_UNWANTED = ("Total mult-adds", "Input size", "Forward/backward", "Params size", "Estimated Total")


def torchinfo_layers(model_copy: nn.Module, call: ModelCall, depth: int) -> str:
    """Return torchinfo's summary of the layers of a model, without its estimates of FLOPs and sizes.

    The totals are those of the model's parameters after the call, each counted once: torchinfo adds up what each call
    of a layer had, whose parameters may be shared, not made yet, or frozen for one optimizer's backward pass.

    Args:
        model_copy: A copy of a model; changed in place.
        call: The call whose shapes are shown.
        depth: The depth of the deepest modules in the summary.

    Raises:
        ImportError: If torchinfo is not installed.
        Exception: The model's own error.
    """
    import torchinfo

    data, keywords = (list(call.args), call.kwargs) if call.args else (dict(call.kwargs), {})
    columns = ("input_size", "output_size", "num_params")
    called, levels = model_copy, depth
    if call.method == "training_step":
        called, data, levels = TrainingStep(model_copy, call), list(call.args[:1]), depth + 1
        if hasattr(data[0], "_fields"):  # torchinfo would rebuild a named tuple from one argument
            data = [tuple(data[0])]
    # keeps torchinfo from changing the modes of the modules
    vars(called).update(train=lambda mode=True: called, eval=lambda: called)
    try:
        with torch.enable_grad(), redirect_backward(model_copy, run_backward):
            statistics = torchinfo.summary(
                called, input_data=data, depth=levels, col_names=columns, verbose=0, **keywords
            )
    except RuntimeError as error:  # torchinfo raises it from the model's own error
        raise (error.__cause__ or error) from None
    for layer in statistics.summary_list:
        layer.calculate_num_params()
    lines = [line for line in str(statistics).splitlines() if not line.startswith(_UNWANTED)]
    lines = [_total(model_copy, line.partition(":")[0]) or line for line in lines]
    return "\n".join(lines[:-1] if lines[-1] == lines[-2] else lines)


def _total(model: nn.Module, name: str) -> str:
    """Return the line with one of torchinfo's totals; nothing for another line."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters() if not is_lazy(p)]
    total, trainable = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    totals = {"Total params": total, "Trainable params": trainable, "Non-trainable params": total - trainable}
    return f"{name}: {totals[name]:,}" if name in totals else ""


class TrainingStep(nn.Module):
    """Runs a module's `training_step` as its `forward`, because torchinfo calls modules with data alone.

    Args:
        module: The module.
        call: The call of the step.
    """

    def __init__(self, module: nn.Module, call: ModelCall) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, batch: Any) -> Any:
        """Run the step with a batch."""
        kind = type(self.call.args[0])
        batch = kind(*batch) if hasattr(kind, "_fields") else batch
        return self.module.training_step(batch, *self.call.args[1:])  # type: ignore[operator]
