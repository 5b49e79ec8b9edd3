"""One table from primitive to the factor rule of its equation; a family of primitives a file."""
