"""One file per built-in method: its name, its needs, and how it is opened. Imports no torch."""
