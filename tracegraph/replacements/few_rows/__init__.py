"""Matmuls of few rows on the Graph, and what is computed with them by one kernel."""
