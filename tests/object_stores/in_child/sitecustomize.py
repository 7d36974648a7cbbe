"""What Python runs first in a process that tests start with this folder on the path: another host, a shorter lease."""

import os

if "TESTS_HOST" in os.environ:
    import platform

    platform.node = lambda: os.environ["TESTS_HOST"]

if {"TESTS_SECONDS_ALIVE", "TESTS_SECONDS_TO_SEND", "TESTS_REFUSED"} & os.environ.keys():
    from lightning_tricks.auto_resume.core.store import lease

if "TESTS_SECONDS_ALIVE" in os.environ:
    lease.SECONDS_ALIVE = float(os.environ["TESTS_SECONDS_ALIVE"])

if {"TESTS_SECONDS_TO_SEND", "TESTS_REFUSED"} & os.environ.keys():
    import time
    from pathlib import Path

    _put = lease.ObjectStore.put

    def put(store: lease.ObjectStore, name: str, path: Path) -> None:
        """Refuse files whose names begin so, and send others slowly: half of one is there for a while."""
        if path.name.startswith(os.environ.get("TESTS_REFUSED", "nothing")):
            raise lease.StoreError("the store refuses it")
        data = path.read_bytes()
        store.write(name, data[: len(data) // 2])
        time.sleep(float(os.environ.get("TESTS_SECONDS_TO_SEND", "0")))
        _put(store, name, path)

    lease.ObjectStore.put = put
