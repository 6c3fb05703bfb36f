"""One step on the device: request rows, input buffers, staging and output rings, launch and collect."""
