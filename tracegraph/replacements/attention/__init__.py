"""Attention over a cache: found on the Graph, and computed by one kernel of ours."""
