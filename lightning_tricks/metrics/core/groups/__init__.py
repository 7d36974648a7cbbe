"""Groups of metrics that share one statistic, so that each batch is counted once for all of them."""
