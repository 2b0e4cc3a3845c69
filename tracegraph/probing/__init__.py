"""What keeps values inside of a replay readable: `tg.probe`, and the rewrite that collects them."""
