"""`lightning-tricks flops`: count the FLOPs of a model before it is trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.console import errors_of_use, make_console, write_json, write_output

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def add_to(commands: Any) -> None:
    """Add the subcommand `flops`."""
    parser: argparse.ArgumentParser = commands.add_parser("flops", help="count a model's FLOPs, module by module")
    add = parser.add_argument
    add(
        "model",
        metavar="MODULE:NAME",
        help="a model, or a function or class that makes one without arguments: torchvision.models:resnet50",
    )
    add(
        "--input",
        type=_shape,
        action="append",
        metavar="1,3,224,224",
        help="shape of an input; once for each argument of forward (default: the model's example_input_array)",
    )
    add(
        "--dtype",
        default="float32",
        help="dtype of the inputs, such as float32, int64 or bfloat16; the model is converted to a floating dtype",
    )
    add("--backward", action="store_true", help="count the backward pass as well")
    add("--depth", type=int, default=3, help="depth of the deepest modules shown (default: %(default)s)")
    add("--backend", default="torch", choices=("torch", "thop"), help="library that counts (default: %(default)s)")
    add("--compare", action="store_true", help="show the counts of the other backend as well")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print all counts as JSON")
    output.add_argument("--csv", action="store_true", help="print all modules as CSV")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_tricks._shared.checks import check_count
    from lightning_tricks._shared.model_argument import import_model, split_model_argument
    from lightning_tricks.flops.core.model_flops import count_flops

    with errors_of_use(arguments):
        check_count("--depth", arguments.depth, minimum=0)
        split_model_argument(arguments.model)
        dtype = _dtype(arguments.dtype)
    model = import_model(arguments.model)
    with errors_of_use(arguments):
        inputs = _inputs(model, arguments.input, dtype)
    count = count_flops(
        model, inputs, backend=arguments.backend, backward=arguments.backward, compare=arguments.compare
    )
    if arguments.json:
        write_json(count.to_dict())
    elif arguments.csv:
        write_output(count.to_csv())
    else:
        make_console().print(count.table(arguments.depth))
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a shape must be whole numbers with commas, such as 1,3,224,224; got {text!r}"
        ) from None


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype must be a torch dtype such as float32, bfloat16 or int64, got {name!r}")
    return dtype


def _inputs(model: nn.Module, shapes: list[tuple[int, ...]] | None, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    import torch

    if dtype.is_floating_point:
        model.to(dtype)
    if shapes is None:
        if getattr(model, "example_input_array", None) is None:
            raise ValueError(f"--input is needed: {type(model).__name__} has no example_input_array")
        return None
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)
