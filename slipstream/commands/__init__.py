"""The commands, one file each. Imported by ``slipstream.cli`` when a command runs, since torch takes seconds."""
