"""Where the segments of a pool come from."""
