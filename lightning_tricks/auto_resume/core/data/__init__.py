"""The position of a DataLoader's iteration: tracked, saved and restored."""
