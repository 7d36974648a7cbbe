"""Verified conversions: what the projects that share an architecture call its parts; each file adds its `FAMILIES`."""
