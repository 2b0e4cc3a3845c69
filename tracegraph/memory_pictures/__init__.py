"""Pictures of memory snapshots: HTML pages and images."""
