"""XLA's foreign function interface: calls of registered handlers with a call frame of our own."""
