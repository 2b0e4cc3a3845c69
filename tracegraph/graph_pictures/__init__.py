"""A captured graph as records, as DOT text and as a picture."""
