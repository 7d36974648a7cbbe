"""The record of a run, what is remarkable in it, and its page; no Lightning."""
