"""Figures and tables for people: bytes, seconds, counts, aligned rows."""
