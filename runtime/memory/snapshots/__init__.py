"""Reports of what an allocator holds, and the files they are kept in."""
