"""What `tg.amp` does: regions whose matmuls round, and a loss scale that stays on the device."""
