"""What `tg.comm` does: copies, sums, pieces and joins of arrays across the local devices."""
