"""The way of a program to a CUDA graph on a machine without a GPU."""
