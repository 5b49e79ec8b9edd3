"""State and activations in host memory, and optimizer state on disk."""
