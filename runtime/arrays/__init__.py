"""Arrays in the memory of graphs: what a call returns, and the buffers below it."""
