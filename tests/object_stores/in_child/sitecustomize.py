"""What Python runs first in a process that tests start with this folder on the path: another host, a shorter lease."""

import os

if "TESTS_HOST" in os.environ:
    import platform

    platform.node = lambda: os.environ["TESTS_HOST"]

if "TESTS_SECONDS_ALIVE" in os.environ:
    from lightning_tricks.auto_resume.core.store import lease

    lease.SECONDS_ALIVE = float(os.environ["TESTS_SECONDS_ALIVE"])
