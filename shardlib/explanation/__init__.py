"""A plan as HTML, curves and Perfetto timelines."""
