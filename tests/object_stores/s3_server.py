"""S3 on loopback, by moto, with faults: `python s3_server.py` prints the port on which it listens.

What is posted to `/control` are its faults from then on, as JSON; all may be left out:
`{"fail": status, "code": its name in S3, "share": of requests in (0, 1], "hold": true, "bandwidth": bytes a second,
"methods": [...], "key": part of the path}`. A request that is held is answered once there are other faults.
"""

import json
import random
import sys
import time

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

SECONDS_HELD = 60


class Slow:
    """A body that arrives with so many bytes a second; it has no `readinto`, by which they would come at once."""

    def __init__(self, body, bandwidth):
        self.body, self.bandwidth = body, bandwidth

    def read(self, size=-1):
        data = self.body.read(min(size, 1 << 20) if size > 0 else size)
        time.sleep(len(data) / self.bandwidth)
        return data

    def __getattr__(self, name):
        if name == "readinto":
            raise AttributeError(name)
        return getattr(self.body, name)


class Faults:
    def __init__(self, application):
        self.application, self.faults, self.chance = application, {}, random.Random(3)

    def __call__(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == "/control":
            self.faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        faults = self.faults
        if method not in faults.get("methods", [method]) or faults.get("key", "") not in path:
            return self.application(environ, start_response)
        until = time.monotonic() + SECONDS_HELD
        while self.faults.get("hold") and time.monotonic() < until:
            time.sleep(0.02)
        if "fail" in faults and self.chance.random() < faults.get("share", 1):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>{faults['code']}</Code><Message>told to fail</Message></Error>".encode()
            header = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start_response(f"{faults['fail']} told to", header)
            return [b"" if method == "HEAD" else body]
        if faults.get("bandwidth"):
            environ["wsgi.input"] = Slow(environ["wsgi.input"], faults["bandwidth"])
        return self.application(environ, start_response)


class Quiet(WSGIRequestHandler):
    def log(self, *args):
        """Log nothing."""


if __name__ == "__main__":
    faulty = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=Quiet)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
