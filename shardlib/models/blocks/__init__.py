"""The parts of the reference models: attention, feed-forward, position encodings, parameters."""
