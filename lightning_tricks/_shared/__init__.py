"""What several rooms need and what is not a trick: checks, patterns, files, random state, dry runs, text, units."""
