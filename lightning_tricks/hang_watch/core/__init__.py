"""The core: what a rank writes while it moves, and the comparison of what the ranks wrote."""
