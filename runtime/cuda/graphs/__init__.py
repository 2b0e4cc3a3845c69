"""CUDA graphs: building, instantiating, updating and launching them."""
