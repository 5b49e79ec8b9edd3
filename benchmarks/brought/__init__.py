"""Models of packages from PyPI that nobody here wrote: what a user brings to shardlib."""
