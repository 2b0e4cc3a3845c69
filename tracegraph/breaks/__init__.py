"""Functions that read traced values on the host: graphs of their parts, and Python between."""
