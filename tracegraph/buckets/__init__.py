"""Shape buckets: one graph per size, arguments padded to the next size, results sliced back."""
