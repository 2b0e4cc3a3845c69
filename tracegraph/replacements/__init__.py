"""Ops of a Graph that something faster can compute: what finds them, and what takes their place."""
