"""A run and its sender, killed at random moments while they send: a sample of what `make kills-in-stores` does."""

import random

from tests.object_stores.kills import kill_and_compare


def test_killed_while_it_sends(s3, tmp_path):
    s3.server.set_faults(bandwidth=20_000_000, methods=["PUT"])
    found = kill_and_compare(tmp_path, s3, kills=3, megabytes=8, chance=random.Random(2))
    assert found.resumed + found.began == 4
