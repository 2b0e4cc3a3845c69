"""Page-locked host memory."""
