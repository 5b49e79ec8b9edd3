"""Kubernetes: its settings, the JobSet, and the engine that creates it."""
