"""Random programs run as those of users do."""

from tests.optimized import optimized as optimized
