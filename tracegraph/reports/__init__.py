"""Reports in text of what was captured, and how."""
