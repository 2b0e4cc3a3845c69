"""Generators of keys, and how a capture draws from them: docs/design/random.md."""
