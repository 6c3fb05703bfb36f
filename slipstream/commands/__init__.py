"""What the commands do, one file each. Imported by ``slipstream.cli`` when a command runs, for torch takes seconds."""
