"""The only loop: schedule, launch, collect. Detokenising and delivery happen beside it, not in it."""
