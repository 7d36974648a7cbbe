"""Download checkpoints, with limits on size and time."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from lightning_tricks.checkpoint_remapping.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    NotACheckpointError,
)

MAX_DOWNLOAD_BYTES = 64 << 30  # bytes; what is larger is better kept, and read as a file
TIMEOUT = 60.0  # seconds in which a server must answer, or send the next bytes
MIN_BYTES_PER_SECOND = 1 << 10  # bytes per second on average, after the first TIMEOUT seconds


def download(address: str, target: Path) -> None:
    """Download a URL (`https://...`, `http://...`, or one that fsspec opens) to a file.

    Raises:
        MissingCheckpointError: If it cannot be downloaded, whatever the reason.
        NotACheckpointError: If it is incomplete, comes too slowly, or has more than `MAX_DOWNLOAD_BYTES` bytes.
    """
    try:
        if urlsplit(address).scheme in ("http", "https"):
            with _opener().open(address, timeout=TIMEOUT) as answer, target.open("wb") as file:
                _copy(address, answer.read1, file, _content_length(answer.headers.get("Content-Length")))
        else:
            import fsspec

            with fsspec.open(address, "rb") as source, target.open("wb") as file:
                _copy(address, source.read, file, None)
    except CheckpointError:
        raise
    except Exception as error:  # of the network, HTTP, TLS, the address itself, or one of fsspec's many libraries
        text = " ".join(str(error).split())[:200]
        raise MissingCheckpointError(f"{address} cannot be downloaded: {text or type(error).__name__}.") from error


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only: `urlopen` follows redirections to ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _content_length(length: str | None) -> int | None:
    if length is None:
        return None
    if not length.strip().isdecimal():
        raise http.client.HTTPException(f"the server gives its length as {length[:40]!r}")
    return int(length)


def _copy(address: str, read: Callable[[int], bytes], file: IO[bytes], announced: int | None) -> None:
    size, began = 0, time.monotonic()
    too_large = f"{address} has more than {MAX_DOWNLOAD_BYTES:,} bytes. Download it yourself, and give the file."
    if announced is not None and announced > MAX_DOWNLOAD_BYTES:
        raise NotACheckpointError(too_large)
    while block := read(1 << 20):
        size += len(block)
        if size > MAX_DOWNLOAD_BYTES:
            raise NotACheckpointError(too_large)
        if time.monotonic() - began > TIMEOUT + size / MIN_BYTES_PER_SECOND:
            raise NotACheckpointError(
                f"{address} was downloaded at less than {MIN_BYTES_PER_SECOND:,} bytes per second. Try again."
            )
        file.write(block)
    if announced is not None and size != announced:
        raise NotACheckpointError(
            f"The download of {address} broke off after {size:,} of {announced:,} bytes. Try again."
        )
