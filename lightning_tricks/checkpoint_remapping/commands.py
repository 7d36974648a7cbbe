"""`lightning-tricks ckpt`: show, compare, align and rename checkpoints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lightning_tricks import checkpoint_remapping  # its names load what they need
from lightning_tricks._shared.checks import check_optional_count, path_argument
from lightning_tricks._shared.console import errors_of_use, make_console
from lightning_tricks._shared.text import format_bytes, format_shape, format_si

if TYPE_CHECKING:
    from rich.tree import Tree
    from torch import Tensor

_FILE_HELP = "a file of weights"


def add_to(commands: Any) -> None:
    """Add the subcommands to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser("ckpt", help="show, compare, align and remap checkpoints")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    show = _tool(
        tools, "show", _show, "show what is in a file: kind, tensors, sizes, metadata; no code of the file is run"
    )
    show.add_argument("file", help=_FILE_HELP)
    show.add_argument(
        "--depth", type=int, metavar="N", help="maximum depth of the modules that are shown (default: all)"
    )
    words = "show how the tensors of two files differ; the exit status is 1 if they do, 2 if one cannot be read"
    diff = _tool(tools, "diff", _diff, words)
    diff.set_defaults(error_status=2)
    diff.add_argument("a", help=_FILE_HELP)
    diff.add_argument("b", help="the file that it is compared with")
    align = _tool(tools, "align", _align, "find which tensor of a file is which of a model")
    align.add_argument("file", help=_FILE_HELP)
    align.add_argument(
        "model",
        metavar="MODULE:NAME",
        help="a model, or a function that returns one: torchvision.models:resnet50 (built on the meta device)",
    )
    align.add_argument(
        "--arguments", default="{}", metavar="JSON", help='arguments of the function, such as {"num_classes": 10}'
    )
    align.add_argument(
        "-r", "--rules", type=path_argument, help="a YAML file of rules, which are applied before the rest is matched"
    )
    align.add_argument("-o", "--out", type=path_argument, metavar="RULES", help="write the rules to this file, as YAML")
    remap = _tool(
        tools,
        "remap",
        _remap,
        "write a copy of a file with other names; an existing output file is replaced atomically",
    )
    remap.add_argument("file", help=_FILE_HELP)
    remap.add_argument(
        "-r", "--rules", type=path_argument, required=True, help="a YAML file of rules, such as `align` writes"
    )
    remap.add_argument(
        "-o",
        "--out",
        type=path_argument,
        required=True,
        help="the output file: .safetensors, or .pt for torch.save",
    )


def _tool(tools: Any, name: str, run: Any, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = tools.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    if name != "diff":
        parser.add_argument("--key", help="the entry of the file that holds the weights (default: it is searched for)")
    parser.set_defaults(run=run)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    from lightning_tricks.checkpoint_remapping.core.files.pickle_values import describe_value, truncated_repr

    with errors_of_use(arguments):
        check_optional_count("--depth", arguments.depth)
    console = make_console()
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    console.print(_tree(checkpoint, arguments.depth))
    if checkpoint.metadata:
        console.print("values beside the weights:", markup=False)
        for name, value in checkpoint.metadata.items():
            shown = name if isinstance(name, str) and name.isprintable() else describe_value(name)
            console.print(f"  {shown}: {truncated_repr(value)}", markup=False, highlight=False)
    if checkpoint.placeholders:
        console.print("objects that were not constructed:", markup=False)
        for part in checkpoint.placeholders:
            console.print(f"  {part.location or 'the file'}: {part.name}", markup=False, highlight=False)
    return 0


def _tree(checkpoint: checkpoint_remapping.Checkpoint, depth: int | None) -> Tree:
    """Return the tensors by module, with the numbers and bytes below each."""
    import torch
    from rich.markup import escape
    from rich.tree import Tree

    tensors = {n: tensor for n, tensor in checkpoint.state_dict.items() if isinstance(tensor, torch.Tensor)}
    below: dict[str, list[Tensor]] = {"": list(tensors.values())}
    for name, tensor in tensors.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            below.setdefault(".".join(parts[:end]), []).append(tensor)
    where = f" under {checkpoint.key}" if checkpoint.key else ""
    root = Tree(escape(f"{checkpoint.source}: {checkpoint.kind}{where}, {_sum(below[''])}"))
    nodes = {"": root}
    for name, tensor in tensors.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent, path = ".".join(parts[: end - 1]), ".".join(parts[:end])
            if path not in nodes and (depth is None or end <= depth):
                nodes[path] = nodes[parent].add(escape(f"{parts[end - 1]}  ({_sum(below[path])})"))
        if depth is None or len(parts) <= depth:
            dtype = str(tensor.dtype).removeprefix("torch.")
            size = format_bytes(tensor.numel() * tensor.element_size())
            text = f"{parts[-1]}  {format_shape(tensor.shape) or 'scalar'}  {dtype}  {size}"
            nodes[".".join(parts[:-1])].add(escape(text))
    return root


def _sum(tensors: list[Tensor]) -> str:
    size = format_bytes(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return f"{len(tensors)} tensors, {format_si(sum(tensor.numel() for tensor in tensors))} numbers, {size}"


def _diff(arguments: argparse.Namespace) -> int:
    import torch
    from rich.table import Table

    first, second = (checkpoint_remapping.read_checkpoint(path).state_dict for path in (arguments.a, arguments.b))
    table = Table(title=f"{arguments.a} and {arguments.b}", title_justify="left")
    for column in ("tensor", "difference"):
        table.add_column(column, overflow="fold")
    same = 0
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if name not in first or name not in second:
                table.add_row(name, f"only in {arguments.b if name not in first else arguments.a}")
            continue
        if a.shape != b.shape:
            table.add_row(name, f"{format_shape(a.shape)} and {format_shape(b.shape)}")
        elif a.dtype != b.dtype:
            table.add_row(name, f"{a.dtype} and {b.dtype}")
        elif not torch.equal(a, b):
            largest = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
            table.add_row(name, f"values differ by up to {largest:.3g}")
        else:
            same += 1
    console = make_console()
    if table.row_count:
        console.print(table)
    console.print(f"{same} tensors are equal, {table.row_count} differ")
    return int(table.row_count > 0)


def _align(arguments: argparse.Namespace) -> int:
    import json

    import torch

    from lightning_tricks._shared.model_argument import import_model, split_model_argument

    with errors_of_use(arguments):
        split_model_argument(arguments.model)
        made_with = json.loads(arguments.arguments)
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    with torch.device("meta"):
        model = import_model(arguments.model, made_with)
    alignment = checkpoint_remapping.align(model, checkpoint, arguments.rules or "auto")
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
