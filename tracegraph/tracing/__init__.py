"""From a function and a call to a checked graph."""
