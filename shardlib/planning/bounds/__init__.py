"""Lower bounds of step time and memory, admissible before anything is placed or priced."""
