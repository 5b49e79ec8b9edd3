"""The terms of many items added up for every shape of a space: basis functions, and the
coefficients in front of them.
"""
