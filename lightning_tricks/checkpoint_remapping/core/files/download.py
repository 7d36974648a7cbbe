"""Download checkpoints, with limits on size and time."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
)

MAX_DOWNLOAD_BYTES = 64 << 30  # bytes; what is larger is better kept, and read as a file
TIMEOUT = 60.0  # seconds in which a server must answer, or send the next bytes


def download(address: str, target: Path) -> None:
    """Download a URL (`https://...`, `http://...`, or one that fsspec opens) to a file.

    Raises:
        MissingCheckpointError: If it cannot be downloaded, whatever the reason.
        NotACheckpointError: If it is incomplete, or has more than `MAX_DOWNLOAD_BYTES` bytes.
    """
    try:
        if urlsplit(address).scheme in ("http", "https"):
            opener = urllib.request.build_opener(_Redirects)
            with opener.open(address, timeout=TIMEOUT) as answer, target.open("wb") as file:
                length = answer.headers.get("Content-Length")
                _copy(address, answer.read1, file, None if length is None else int(length))
        else:
            import fsspec

            with fsspec.open(address, "rb") as source, target.open("wb") as file:
                _copy(address, source.read, file, None)
    except CheckpointError:
        raise
    except Exception as error:  # of the network, HTTP, TLS, the address itself, or one of fsspec's many libraries
        text = " ".join(str(error).split())[:200]
        raise MissingCheckpointError(f"{address} cannot be downloaded: {text or type(error).__name__}.") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections to http and https only: that of the standard library goes to ftp as well."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the next request."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.URLError(f"a redirection to {newurl[:80]} is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _copy(address: str, read: Callable[[int], bytes], file: IO[bytes], announced: int | None) -> None:
    size = 0
    too_large = f"{address} has more than {MAX_DOWNLOAD_BYTES:,} bytes. Download it yourself, and give the file."
    if announced is not None and announced > MAX_DOWNLOAD_BYTES:
        raise NotACheckpointError(too_large)
    while block := read(1 << 20):
        size += len(block)
        if size > MAX_DOWNLOAD_BYTES:
            raise NotACheckpointError(too_large)
        file.write(block)
    if announced is not None and size != announced:
        raise NotACheckpointError(
            f"The download of {address} broke off after {size:,} of {announced:,} bytes. Try again."
        )
