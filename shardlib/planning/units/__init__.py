"""Figures and tables for people: bytes, seconds, counts, aligned rows; HTML, and cards of it."""
