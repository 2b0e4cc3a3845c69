"""Kernels of matmuls: of few rows, small ones, and float32 in parts on tensor cores."""
