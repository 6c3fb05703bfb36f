"""One file for each built-in method: what it is called, what it needs, and how it is opened. Imports no torch."""
