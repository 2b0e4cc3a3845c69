"""Captured functions ↔ files: what `save` writes, and the callable that `tg.load` makes of it."""
