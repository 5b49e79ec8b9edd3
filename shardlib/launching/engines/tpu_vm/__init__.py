"""Cloud TPU VMs: their settings, and the engine that writes the script of every host."""
