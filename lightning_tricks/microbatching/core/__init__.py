"""The pure core: how a batch is cut, compared and undone; torch only."""
