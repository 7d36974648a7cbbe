"""`lightning-tricks ckpt`: show, compare, align and rename checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning_tricks import checkpoint_remapping  # its names load what they need
from lightning_tricks._shared.checks import check_optional_count, file_argument, path_argument
from lightning_tricks._shared.console import errors_of_use, make_console, write_json
from lightning_tricks._shared.text import format_bytes, format_shape, format_si

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_tricks._shared.fitting_table import FoldedName

_FILE_HELP = "a file of weights"


def add_to(commands: Any) -> None:
    """Add the subcommands to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser("ckpt", help="show, compare, align and remap checkpoints")
    tools = parser.add_subparsers(metavar="TOOL")
    show = _tool(
        tools, "show", _show, "show what is in a file: kind, tensors, sizes, metadata; no code of the file is run"
    )
    show.add_argument("file", type=file_argument, help=_FILE_HELP)
    show.add_argument(
        "--depth", type=int, metavar="N", help="maximum depth of the modules that are shown (default: all)"
    )
    show.add_argument("--json", action="store_true", help="print all tensors and values as JSON")
    words = "show how the tensors of two files differ; the exit status is 1 if they do, 2 if one cannot be read"
    diff = _tool(tools, "diff", _diff, words)
    diff.set_defaults(error_status=2)
    diff.add_argument("a", type=file_argument, help=_FILE_HELP)
    diff.add_argument("b", type=file_argument, help="the file that it is compared with")
    diff.add_argument("--json", action="store_true", help="print JSON")
    align = _tool(tools, "align", _align, "find which tensor of a file is which of a model")
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
        "-r", "--rules", type=path_argument, help="a YAML file of rules, which are applied before the rest is matched"
    )
    align.add_argument(
        "--accept", nargs="+", default=[], metavar="PATTERN", help="names of the model whose suggestions are taken"
    )
    align.add_argument("-o", "--out", type=path_argument, metavar="RULES", help="write the rules to this file, as YAML")
    align.add_argument("--json", action="store_true", help="print JSON")
    remap = _tool(
        tools,
        "remap",
        _remap,
        "write a copy of a file with other names; an existing output file is replaced atomically",
    )
    remap.add_argument("file", type=file_argument, help=_FILE_HELP)
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
    import torch
    from rich.console import Group

    from lightning_tricks.checkpoint_remapping.core.files.pickle_values import describe_value, truncated_repr

    with errors_of_use(arguments):
        check_optional_count("--depth", arguments.depth)
    console = make_console(highlight=False)
    checkpoint = checkpoint_remapping.read_checkpoint(arguments.file, key=arguments.key)
    tensors = {n: tensor for n, tensor in checkpoint.state_dict.items() if isinstance(tensor, torch.Tensor)}
    beside = {
        name if isinstance(name, str) and name.isprintable() else describe_value(name): value
        for name, value in checkpoint.metadata.items()
    }
    if arguments.json:
        write_json(
            {
                **{name: getattr(checkpoint, name) for name in ("source", "kind", "key")},
                "tensors": {name: _describe(tensor) for name, tensor in tensors.items()},
                "metadata": {n: value if _is_plain(value) else truncated_repr(value) for n, value in beside.items()},
                "placeholders": [{"location": each.location, "name": each.name} for each in checkpoint.placeholders],
            }
        )
        return 0
    console.print(Group(*_lines(checkpoint, tensors, arguments.depth)))
    if beside:
        console.print("values beside the weights:", markup=False)
        for name, value in beside.items():
            console.print(f"  {name}: {truncated_repr(value)}", markup=False)
    if checkpoint.placeholders:
        console.print("objects that were not constructed:", markup=False)
        for part in checkpoint.placeholders:
            console.print(f"  {part.location or 'the file'}: {part.name}", markup=False)
    return 0


def _describe(tensor: Tensor) -> dict[str, Any]:
    size = tensor.numel() * tensor.element_size()
    return {"shape": [*tensor.shape], "dtype": str(tensor.dtype).removeprefix("torch."), "bytes": size}


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, float, str, type(None)) or (type(value) is int and value.bit_length() < 64)


def _lines(
    checkpoint: checkpoint_remapping.Checkpoint, tensors: Mapping[str, Tensor], depth: int | None
) -> Iterator[FoldedName]:
    """Yield the tensors by module, with the numbers and bytes below each."""
    from lightning_tricks._shared.fitting_table import FoldedName

    below: dict[str, list[Tensor]] = {}
    order: dict[str, int] = {}  # the parts of a module stand together, wherever they are in the file
    for index, (name, tensor) in enumerate(tensors.items()):
        for path in _paths(name):
            order.setdefault(path, index)
            below.setdefault(path, []).append(tensor)
    where = f" under {checkpoint.key}" if checkpoint.key else ""
    yield FoldedName(f"{checkpoint.source}: {checkpoint.kind}{where}, {_sum([*tensors.values()])}")
    shown = set()
    for name in sorted(tensors, key=lambda name: [order[path] for path in _paths(name)]):
        *modules, leaf = _paths(name)
        for level, module in enumerate(modules[:depth], 1):
            if module not in shown:
                shown.add(module)
                yield FoldedName(f"{module.rpartition('.')[2]}  ({_sum(below[module])})", indent="  " * level)
        if depth is None or len(modules) < depth:
            of_tensor = _describe(tensors[name])
            shape, size = format_shape(of_tensor["shape"]) or "scalar", format_bytes(of_tensor["bytes"])
            text = f"{leaf.rpartition('.')[2]}  {shape}  {of_tensor['dtype']}  {size}"
            yield FoldedName(text, indent="  " * (len(modules) + 1))


def _paths(name: str) -> list[str]:
    """Return the names of the modules that a tensor is in, and its own."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _sum(tensors: list[Tensor]) -> str:
    size = format_bytes(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    words = f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    return f"{words}, {format_si(sum(tensor.numel() for tensor in tensors))} numbers, {size}"


def _diff(arguments: argparse.Namespace) -> int:
    import torch
    from rich.text import Text

    from lightning_tricks._shared.fitting_table import FittingTable, FoldedName

    title = f"{arguments.a} and {arguments.b}"
    table = FittingTable("tensor", "difference", title=Text(title, "table.title"), title_justify="left")
    first, second = (checkpoint_remapping.read_checkpoint(path).state_dict for path in (arguments.a, arguments.b))
    differences, same = [], 0
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        values = [_describe(each) if isinstance(each, torch.Tensor) else None for each in (a, b)]
        if name in first and name in second and None in values:
            continue
        words, largest = _difference(a, b, arguments)
        same += not words
        if words:
            table.add_row(FoldedName(name), words)
            differences.append({"tensor": name, "a": values[0], "b": values[1], "max_difference": largest})
    if arguments.json:
        write_json({"a": arguments.a, "b": arguments.b, "equal": same, "differences": differences})
        return int(table.row_count > 0)
    console = make_console()
    if table.row_count:
        console.print(table)
    console.print(f"{same} tensors are equal, {table.row_count} differ")
    return int(table.row_count > 0)


def _difference(a: Any, b: Any, arguments: argparse.Namespace) -> tuple[str, float | None]:
    """Return how two tensors differ in words, empty where they are equal, and by how much where only values differ."""
    import torch

    if a is None or b is None:
        return f"only in {arguments.b if a is None else arguments.a}", None
    if a.shape != b.shape:
        return f"{format_shape(a.shape)} and {format_shape(b.shape)}", None
    if a.dtype != b.dtype:
        return f"{a.dtype} and {b.dtype}", None
    if torch.equal(a, b):
        return "", 0.0
    largest = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
    return f"values differ by up to {largest:.3g}", largest


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
    alignment = checkpoint_remapping.align(model, checkpoint, arguments.rules or "auto", arguments.accept)
    console = make_console(quiet=arguments.json)
    if arguments.json:
        write_json(_alignment_values(alignment))
    console.print(alignment.report())
    if arguments.out:
        alignment.save(arguments.out)
        console.print(f"rules written to {arguments.out}")
    return 0


def _alignment_values(alignment: checkpoint_remapping.Alignment) -> dict[str, Any]:
    of_match = ("sources", "targets", "transpose", "shape", "sizes", "reason", "strength")
    of_mismatch = ("source", "source_shape", "target", "target_shape")
    counts = ("loaded", "total", "loaded_parameters", "total_parameters")
    lists = ("missing", "computed", "unexpected", "ambiguous", "diagnosis")
    return {
        **{name: getattr(alignment, name) for name in counts},
        **{
            kind: [{name: getattr(match, name) for name in of_match} for match in getattr(alignment, kind)]
            for kind in ("matches", "suggested")
        },
        "mismatched": [{name: getattr(each, name) for name in of_mismatch} for each in alignment.mismatched],
        **{name: getattr(alignment, name) for name in lists},
    }


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
