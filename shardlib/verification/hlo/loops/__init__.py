"""Loops of a compiled program: how often their bodies run, and branches of conditionals in them."""
