"""The commands of `shardlib`, a file for those that belong together: `planning` (with
`run_options`), `scaling`, `verifying`, `training`, `serving`, `launching` (with `here`,
`submitting` and `launch_words`), `examining` and `tables`.
"""
