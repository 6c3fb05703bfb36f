"""From sound to a transcript with times, by a speech model that an engine runs."""
