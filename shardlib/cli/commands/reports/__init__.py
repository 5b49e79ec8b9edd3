"""Pages and comparisons of plans: the options of `explain` for its page, and `diff`."""
