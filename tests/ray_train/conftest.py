"""These need Ray, which `make test-ray` installs; elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["*.py"]
