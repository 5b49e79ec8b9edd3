"""In which order parameters cross a link: that in which the next forward pass needs them.

first_use.py  where a forward pass first uses each parameter, from its graph
buckets.py    runs of elements in that order, of so many bytes each
replay.py     a step in time: gradients, transfers and the next forward pass
picture.py    what an exchange of islands moves, as a picture in time
"""
