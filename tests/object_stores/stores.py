"""Places for objects that tests look into: an S3 server of their own, and a folder."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote, unquote
from uuid import uuid4
from xml.sax.saxutils import unescape

BUCKET = "bucket"


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"file://{folder}"

    def names(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class S3Server:
    """A server of S3, in a process of its own."""

    def __init__(self) -> None:
        program = [sys.executable, Path(__file__).with_name("s3_server.py")]
        quiet = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=quiet)
        self.url = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def set_faults(self, **faults: object) -> None:
        """Let requests fail from now on, as s3_server.py says; without any, let none fail."""
        self.request("POST", "/control", json.dumps(faults).encode())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class S3Store:
    """The objects at an address of its own on the server."""

    def __init__(self, server: S3Server, name: str = "") -> None:
        self.server, self.key = server, f"{uuid4().hex}{name}"
        self.address = f"s3://{BUCKET}/{self.key}"

    def names(self) -> set[str]:
        found = self.server.request("GET", f"/{BUCKET}?list-type=2&prefix={quote(self.key)}/&max-keys=1000").decode()
        keys = (unescape(unquote(key)) for key in re.findall(r"<Key>(.*?)</Key>", found))
        return {key.removeprefix(f"{self.key}/") for key in keys}

    def read(self, name: str) -> bytes:
        return self.server.request("GET", self._path(name))

    def write(self, name: str, data: bytes) -> None:
        self.server.request("PUT", self._path(name), data)

    def remove(self, name: str) -> None:
        self.server.request("DELETE", self._path(name))

    def _path(self, name: str) -> str:
        return f"/{BUCKET}/{quote(f'{self.key}/{name}')}"
