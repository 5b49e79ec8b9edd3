"""How an operation gets a sharded weight, and how the gradient of that weight is reduced."""
