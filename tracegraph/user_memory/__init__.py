"""Memory that users ask for by name: pools and pinned arrays."""
