"""With-blocks whose ops are recorded: the second door to the pipeline of captures."""
