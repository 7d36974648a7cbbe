"""`lightning-tricks ckpt`: show, align and rename checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from lightning_tricks import checkpoint_remapping  # its names load what they need
from lightning_tricks._shared.checks import file_argument, path_argument
from lightning_tricks._shared.console import errors_of_use, make_console
from lightning_tricks._shared.text import counted, format_bytes, format_shape, format_si

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_tricks._shared.fitting_table import FoldedName

_FILE_HELP = "a file of weights"


def add_to(commands: Any) -> None:
    """Add the subcommands to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser("ckpt", help="show, align and remap checkpoints")
    tools = parser.add_subparsers(metavar="TOOL")
    show = _tool(
        tools, "show", _show, "show what is in a file: kind, tensors, sizes, metadata; no code of the file is run"
    )
    show.add_argument("file", type=file_argument, help=_FILE_HELP)
    align = _tool(tools, "align", _align, "match the tensors of a file to those of a model")
    align.add_argument("file", type=file_argument, help=_FILE_HELP)
    align.add_argument(
        "model",
        metavar="MODULE:NAME",
        help="a model, or a function that returns one: torchvision.models:resnet50 (built on the meta device)",
    )
    align.add_argument(
        "--arguments", default="{}", metavar="JSON", help='arguments of the function, such as {"num_classes": 10}'
    )
    align.add_argument(
        "-r", "--rules", type=path_argument, help="a YAML file of rules to apply before the other tensors are matched"
    )
    align.add_argument(
        "--accept", nargs="+", default=[], metavar="PATTERN", help="names in the model for which to accept suggestions"
    )
    align.add_argument("-o", "--out", type=path_argument, metavar="RULES", help="write the rules to this file, as YAML")
    remap = _tool(
        tools,
        "remap",
        _remap,
        "write a copy of a file with renamed tensors; an existing output file is replaced atomically",
    )
    remap.add_argument("file", type=file_argument, help=_FILE_HELP)
    remap.add_argument(
        "-r", "--rules", type=path_argument, required=True, help="a YAML file of rules, such as `align` writes"
    )
    remap.add_argument(
        "-o", "--out", type=path_argument, required=True, help="the output file: .safetensors, or .pt for torch.save"
    )


def _tool(tools: Any, name: str, run: Any, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = tools.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    parser.add_argument("--key", help="the entry of the file that contains the weights (default: searched for)")
    parser.set_defaults(run=run)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Group
    from rich.pretty import pretty_repr

    from lightning_tricks.checkpoint_remapping.core.files.pickle_values import describe_value

    console = make_console(highlight=False)
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    tensors = {n: tensor for n, tensor in checkpoint.state_dict.items() if isinstance(tensor, torch.Tensor)}
    console.print(Group(*_lines(checkpoint, tensors)))
    if checkpoint.metadata:
        console.print("values beside the weights:", markup=False)
        for name, value in checkpoint.metadata.items():
            shown = name if isinstance(name, str) and name.isprintable() else describe_value(name)
            text = shorten(pretty_repr(value, max_length=8, max_string=80, max_depth=2), 100, placeholder="...")
            console.print(f"  {shown}: {text}", markup=False)
    if checkpoint.placeholders:
        console.print("objects that were not constructed:", markup=False)
        for part in checkpoint.placeholders:
            console.print(f"  {part.location or 'the file'}: {part.name}", markup=False)
    return 0


def _lines(checkpoint: checkpoint_remapping.Checkpoint, tensors: Mapping[str, Tensor]) -> Iterator[FoldedName]:
    from lightning_tricks._shared.fitting_table import FoldedName

    where = f" under {checkpoint.key}" if checkpoint.key else ""
    yield FoldedName(f"{checkpoint.source}: {checkpoint.kind}{where}, {_sum([*tensors.values()])}")
    for name, tensor in tensors.items():
        shape, dtype = format_shape(tensor.shape) or "scalar", str(tensor.dtype).removeprefix("torch.")
        yield FoldedName(f"{name}  {shape}  {dtype}  {format_bytes(tensor.nbytes)}", indent="  ")


def _sum(tensors: list[Tensor]) -> str:
    size = format_bytes(sum(tensor.nbytes for tensor in tensors))
    words = counted(len(tensors), "tensor")
    return f"{words}, {format_si(sum(tensor.numel() for tensor in tensors))} numbers, {size}"


def _align(arguments: argparse.Namespace) -> int:
    import json

    import torch

    from lightning_tricks._shared.model_argument import import_model, split_model_argument

    with errors_of_use(arguments):
        split_model_argument(arguments.model)
        made_with = json.loads(arguments.arguments)
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    model = import_model(arguments.model, made_with, torch.device("meta"))
    alignment = checkpoint_remapping.align(model, checkpoint, arguments.rules or "auto", arguments.accept)
    console = make_console()
    console.print(alignment.report())
    if arguments.out:
        alignment.save(arguments.out)
        console.print(f"rules written to {arguments.out}")
    return 0


def _remap(arguments: argparse.Namespace) -> int:
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    remapped = checkpoint_remapping.remap_keys(checkpoint.state_dict, checkpoint_remapping.read_rules(arguments.rules))
    checkpoint_remapping.save_weights(remapped, arguments.out, clean=False)
    console = make_console()
    for rule in remapped.unmatched:
        console.print(f"this rule matched nothing: {rule}", markup=False)
    console.print(
        f"{arguments.out}: {len(remapped)} tensors, {len(remapped.renamed)} renamed, {len(remapped.dropped)} dropped",
        highlight=False,
    )
    return 0
