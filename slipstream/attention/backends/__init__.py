"""One file per attention backend, and what it needs."""
