"""Files of models: found, fetched, checked and read, whatever format they are in."""
