"""A plan in words and pictures for people: the explanation, differences, and the timeline of its
pipeline.
"""
