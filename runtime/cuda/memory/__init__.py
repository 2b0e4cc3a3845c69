"""Memory of a GPU: where segments come from, staging, and what is held for pending work."""
