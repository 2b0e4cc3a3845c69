"""Where buffers live, for how long, and which steps wait for which."""
