"""From device to replay: what exists while a captured graph runs."""
