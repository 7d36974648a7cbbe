"""Every use of a private torch symbol, one guarded function each, in files by topic."""
