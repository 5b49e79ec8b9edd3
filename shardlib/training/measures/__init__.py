"""What a run measures of itself: losses and metrics, rates, the load of the machine, profiles."""
