"""What the public names for devices do: the current device, properties, telemetry."""
