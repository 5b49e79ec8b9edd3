"""The search for the best plan, exact within the cost model.

Read from top to bottom: `units` write figures for people; `decisions` are what a plan decides;
`plan` is the value that comes out; `space` lists the candidates; `bounds` say what no candidate can
beat; `search` finds the best; `answers`, `text` and `pictures` are what it can be asked;
`questions` search again for the answers; `planner` is the door to all of it. `edge` plans chains of
unlike devices.
"""
