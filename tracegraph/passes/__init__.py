"""Graph to Graph rewrites, one per file."""
