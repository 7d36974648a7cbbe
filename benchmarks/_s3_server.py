"""moto's S3 on this machine, which takes in so many bytes a second and logs requests: `python _s3_server.py RATE LOG`.

It prints its port. All connections share the rate.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

PIECE = 2**20


class Line:
    """What all connections share: so many bytes a second."""

    def __init__(self, rate: float) -> None:
        self.rate, self.is_free, self.lock = rate, 0.0, threading.Lock()

    def carry(self, size: int) -> None:
        """Wait until so many bytes would have come."""
        with self.lock:
            self.is_free = max(self.is_free, time.monotonic()) + size / self.rate
            until = self.is_free
        time.sleep(max(0.0, until - time.monotonic()))


class SlowBody:
    """The body of a request; it has no `readinto`, which would be faster."""

    def __init__(self, body: Any, line: Line) -> None:
        self.body, self.line = body, line

    def read(self, size: int = -1) -> bytes:
        """Return at most some bytes, once they would have come."""
        is_all = size is None or size < 0
        data: bytes = self.body.read(PIECE if is_all else min(size, PIECE))
        self.line.carry(len(data))
        return data + self.read() if data and is_all else data

    def __getattr__(self, name: str) -> Any:
        if name == "readinto":
            raise AttributeError(name)
        return getattr(self.body, name)


def main(rate: float, log: str) -> None:
    """Serve until it is killed."""
    moto, line = DomainDispatcherApplication(create_backend_app), Line(rate)
    with Path(log).open("w", buffering=1) as lines:

        def slow(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            lines.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}\n")
            environ["wsgi.input"] = SlowBody(environ["wsgi.input"], line)
            return moto(environ, start_response)

        server = make_server("127.0.0.1", 0, slow, threaded=True)
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
