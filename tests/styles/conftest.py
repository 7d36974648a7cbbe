"""The styles are run by tests, and are none; imported twice they would be entered twice."""

collect_ignore = ["frame.py", "scripts.py"]
