"""Models: from a name to files, from files to weights and tokenizers, and one file per architecture."""
