"""The harnesses run what users run."""

from tests.optimized import optimized as optimized
