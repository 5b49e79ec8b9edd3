"""Documents as tokens on disk: built once, found again, and checked."""
