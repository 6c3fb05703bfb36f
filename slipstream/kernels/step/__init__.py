"""What begins and ends a step on the request rows."""
