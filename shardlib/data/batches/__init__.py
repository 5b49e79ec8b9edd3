"""Examples in a reproducible order, packed into rows, as batches on devices."""
