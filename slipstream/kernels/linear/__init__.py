"""Products with weights: dense, quantised, of experts."""
