"""Programs that Triton's Python backend runs, with `settings.json` beside each; they are copied to
repositories and not imported here.
"""
