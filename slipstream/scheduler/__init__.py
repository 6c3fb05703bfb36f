"""Pure decisions: which requests run, with how many tokens and which pages. Imports no torch."""
