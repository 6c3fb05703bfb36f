"""Recorded steps: which batches have a graph, how graphs are made, and which one a batch takes."""
