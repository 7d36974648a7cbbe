"""Every use of a private Lightning symbol and of a Lightning version, one guarded function each, in files by topic."""
