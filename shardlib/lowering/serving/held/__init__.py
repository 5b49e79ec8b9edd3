"""How a CPU holds weights that are only multiplied with (`columns`); which these are (`uses`)."""
