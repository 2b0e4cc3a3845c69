"""Tests on a real GPU: ``python -m pytest tests/gpu`` from a checkout; elsewhere they skip."""
