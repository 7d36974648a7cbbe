"""The styles are run by tests, and are none; imported twice they would be entered twice."""

collect_ignore = ["batches.py", "frame.py", "habits.py", "loaders.py", "models.py"]
