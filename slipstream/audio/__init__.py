"""Sound from files to log-mel features. Knows no model and no engine."""
