"""What was compiled, decoded, planned and verified for a program, kept on the disk."""
