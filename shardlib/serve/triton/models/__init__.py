"""Models of Triton's repository, copied by an export; each file runs alone."""
