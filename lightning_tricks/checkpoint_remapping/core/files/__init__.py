"""Files of weights of any format, read as data and written atomically."""
