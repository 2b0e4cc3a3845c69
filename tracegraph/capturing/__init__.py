"""From a checked graph to an instantiated capture, once per signature."""
