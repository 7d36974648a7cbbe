"""Nothing here is a test: what `make mutants` runs needs an extra that tests do without."""

collect_ignore_glob = ["*.py"]
