"""Kernels of loops and branches: conditions, counters, slices, and loops that become one."""
