"""The pure core: how each method is fitted to logits and labels; torch and numpy only."""
