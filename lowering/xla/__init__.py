"""Reading XLA's compiled GPU programs: container, schema, thunks."""
