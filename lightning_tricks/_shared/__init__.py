"""What several rooms need: checks of arguments, and patterns over qualified names."""
