"""What Python runs first in a process that tests start with this folder on the path: another host, a shorter lease."""

import os

if "TESTS_HOST" in os.environ:
    import platform

    platform.node = lambda: os.environ["TESTS_HOST"]

if "TESTS_SECONDS_ALIVE" in os.environ:
    from lightning_tricks.auto_resume.core.store import lease

    lease.SECONDS_ALIVE = float(os.environ["TESTS_SECONDS_ALIVE"])

if "TESTS_SECONDS_TO_SEND" in os.environ:
    import time
    from pathlib import Path

    from lightning_tricks.auto_resume.core.store.object_store import ObjectStore, StoreError

    _put, _seconds = ObjectStore.put, float(os.environ["TESTS_SECONDS_TO_SEND"])

    def put(store, name: str, path: Path) -> None:
        """Send shards slowly, so that half of one is there for a while; never, if it takes for ever."""
        if path.name.startswith("__"):
            if _seconds == float("inf"):
                raise StoreError("the store refuses this node")
            data = path.read_bytes()
            store.write(name, data[: len(data) // 2])
            time.sleep(_seconds)
        _put(store, name, path)

    ObjectStore.put = put
