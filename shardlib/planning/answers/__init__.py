"""What a plan answers when it is asked: alternatives, constraints, shadow prices, and the move to
another machine. Values only.
"""
