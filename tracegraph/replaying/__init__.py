"""What happens at every call of a captured function."""
