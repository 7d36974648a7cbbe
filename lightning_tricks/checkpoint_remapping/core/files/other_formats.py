"""Files and folders whose weights are not read: what they are, by their content or name, with a remedy for each."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_tricks.checkpoint_remapping.core.errors import NotACheckpointError

DOWNLOAD_AGAIN = "Download it again."
UNPACK_IT = "Unpack it, and give the file inside."
# Files that are often taken for checkpoints: patterns of their first bytes, and what they are
_BEGINNINGS = (
    (rb"version https://git-lfs", "a git-LFS pointer. Run `git lfs pull` where it was cloned."),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!|.{257}ustar", f"a compressed archive. {UNPACK_IT}"),
    (rb"\x89HDF", "an HDF5 file, as Keras writes them. Convert it to .safetensors where Keras is installed."),
    (rb"GGUF", "a GGUF file, whose weights are quantized. Take the .safetensors or .pt of the same model."),
    (
        rb"(?i:(?:\xef\xbb\xbf|\s)*<(?:!doctype html|html|head|body|script))",
        "an HTML page. Take the address of the file itself, not of the page that shows it.",
    ),
)


def refuse_formats(head: bytes) -> None:
    """Refuse a file with the beginning of another format.

    Raises:
        NotACheckpointError: If it is one; the message continues "it is".
    """
    for pattern, what in _BEGINNINGS:
        if re.match(pattern, head, re.DOTALL):
            raise NotACheckpointError(what)


def describe_other(head: bytes, error: NotACheckpointError) -> str:
    """Describe a file that is not a pickle, by its first bytes."""
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return f"{str(error).rstrip('.')}. {DOWNLOAD_AGAIN}"
    if all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in head):
        first = "".join(head[:40].decode("ascii").strip().splitlines()[:1])
        return f"a text file, which begins with {first!r}."
    return (
        "not in a format of weights that this reader knows, such as those of torch and safetensors. If it should be in "
        f"one: {DOWNLOAD_AGAIN}"
    )


def describe_directory(path: Path) -> str:
    """Describe a directory, and how to make one file of weights from it."""
    files = {file.name for file in path.iterdir()}
    if ".metadata" in files:
        tool = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        return f"a directory of torch.distributed.checkpoint. Make one file of it: {tool}"
    if "zero_to_fp32.py" in files:
        return f"a DeepSpeed directory. Make one file of it: python {path / 'zero_to_fp32.py'} {path} weights.pt"
    weights = sorted(
        (file for file in files if file.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json"))),
        key=lambda file: (not file.endswith(".index.json"), not file.endswith(".safetensors"), file),
    )
    return f"a directory. Give a file{f' in it, such as {path / weights[0]}' if weights else ''}."


def describe_archive(names: list[str]) -> str:
    """Describe a zip archive that contains no checkpoint."""
    shown = ", ".join(name[:80] for name in names[:3])
    return f"a zip archive without a checkpoint in it (it holds {shown or 'nothing'}). {UNPACK_IT}"
