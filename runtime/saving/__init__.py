"""Records of plain values ↔ files: the codec, and the layout of a file."""
