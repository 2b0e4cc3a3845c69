"""The IR: the graph of a traced function, with its printer, verifier and interpreter."""
