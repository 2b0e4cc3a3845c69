"""Memory of a GPU: where segments come from, and memory held for pending work."""
