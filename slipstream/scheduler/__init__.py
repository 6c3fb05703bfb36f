"""Pure decisions: who runs, how many tokens, which pages. Imports no torch."""
