"""The caching allocator and private pools."""
