"""Device operations, one subject a file: the reference that defines it, and the operation the engine calls."""
