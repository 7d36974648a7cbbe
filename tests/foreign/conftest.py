"""These run in environments of their own, by `make foreign`; no test imports them."""

collect_ignore_glob = ["*.py"]
