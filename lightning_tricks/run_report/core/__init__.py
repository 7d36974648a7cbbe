"""The record of a run, its findings and its page, without Lightning."""
