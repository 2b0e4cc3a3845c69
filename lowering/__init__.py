"""From a capture request to a graph definition: compile, plan, build."""
