"""The objects below an address such as `s3://bucket/run`, by fsspec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_tricks._shared.extras import needed_for_address
from lightning_tricks._shared.text import describe_error


class StoreError(OSError):
    """An object store refused something, or could not be reached; its text is a sentence."""

    def __str__(self) -> str:
        return str(self.args[0])


class ObjectStore:
    """The objects below an address. An object appears as a whole or not at all, and cannot be renamed.

    Args:
        address: An address that fsspec opens.

    Raises:
        StoreError: From all methods, if the store refuses something or cannot be reached.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._connection: tuple[Any, str] | None = None
        with self._explaining():
            # At construction, where an unknown protocol or a package that is missing can still be told to the user.
            self._connect()

    def _connect(self) -> tuple[Any, str]:
        """Return the file system, and the path of the address in it; after an error a new one, with new credentials."""
        if self._connection is None:
            try:
                from fsspec.core import url_to_fs

                options = {"auto_mkdir": True} if self.address.startswith(("file:", "local:")) else {}
                # fsspec gives one object for equal arguments, with the credentials of its first use and the listings of
                # all (s3fs #657, #851): others write here, and credentials expire (s3fs #500). Folders on a disk have
                # to be made, unlike names in a store.
                files, root = url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True, **options)
            except ImportError as error:
                needed = needed_for_address(self.address, error)
                raise StoreError(f"{self.address} cannot be opened: {needed}") from error
            self._connection = files, str(root).rstrip("/")
        return self._connection

    @property
    def _files(self) -> Any:
        return self._connect()[0]

    def sizes(self) -> dict[str, int]:
        """Return the names of all objects below the address, and their sizes in bytes."""
        with self._explaining():
            files, root = self._connect()
            # Some file systems have a cache of their own beside that of fsspec.
            files.invalidate_cache()
            found = files.find(root, detail=True)
        start = root.lstrip("/") + "/"
        named = ((path.lstrip("/"), entry) for path, entry in found.items())
        return {path[len(start) :]: int(entry["size"] or 0) for path, entry in named if path.startswith(start)}

    def read(self, name: str) -> bytes:
        """Return the bytes of an object.

        Raises:
            FileNotFoundError: If there is none of that name.
        """
        with self._explaining(may_lack=True):
            return bytes(self._files.cat_file(self._path(name)))

    def get(self, name: str, path: Path) -> None:
        """Copy an object to a file.

        Raises:
            FileNotFoundError: If there is none of that name.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explaining(may_lack=True):
            self._files.get_file(self._path(name), str(path))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        with self._explaining():
            self._files.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; return False if there is one, where the store can tell."""
        with self._explaining():
            try:
                # `If-None-Match: *` and its like at other stores (fsspec #1693; since s3fs 2024.12).
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def put(self, name: str, path: Path) -> None:
        """Create or replace an object with the bytes of a file."""
        with self._explaining():
            self._files.put_file(str(path), self._path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove the objects of these names that exist."""
        # One by one, in their order: fsspec's `rm` of several may remove them in any, and a manifest has to go first.
        for name in names:
            with self._explaining(may_lack=True):
                try:
                    self._files.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def seconds_between(self, earlier: str, later: str) -> float:
        """Return how long after one object another one was written, by the clock of the store."""
        with self._explaining(may_lack=True):
            written = [self._files.modified(self._path(name)) for name in (earlier, later)]
        return float((written[1] - written[0]).total_seconds())

    def _path(self, name: str) -> str:
        return f"{self._connect()[1]}/{name}"

    @contextmanager
    def _explaining(self, *, may_lack: bool = False) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # of one of fsspec's many libraries
            if may_lack and isinstance(error, FileNotFoundError):
                raise
            # Opened anew at the next call, which reads renewed credentials.
            self._connection = None
            text = " ".join(describe_error(error).split())[:300].rstrip(".")
            raise StoreError(
                f"{self.address} cannot be used: {text}. Check the address, the credentials and the connection."
            ) from error
