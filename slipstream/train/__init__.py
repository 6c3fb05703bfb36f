"""Training draft heads: data from the target itself, its hidden states as it reads them, a head in a known format."""
