"""Verified conversions: what the projects that share an architecture call its parts, and how names are found there."""
