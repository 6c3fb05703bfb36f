"""CUDA graphs: which batches have one, how graphs are captured, and which graph a batch runs in."""
