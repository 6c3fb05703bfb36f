"""Device operations, one subject per file: the reference that defines it, and the operation the engine calls."""
