"""Files of text, records and tokens, near or far, read through a bounded cache."""
