"""What a graph consists of: records of nodes, stages and slots, which lowering fills."""
