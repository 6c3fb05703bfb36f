"""The engine loop: schedule, launch, collect. Detokenising and delivery happen in other threads or processes."""
