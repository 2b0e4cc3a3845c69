"""Fusions along rows: norms, their derivatives, and losses in one kernel each."""
