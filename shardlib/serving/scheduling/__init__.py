"""Who is served next, and where keys and values go. Plain values of Python: no JAX in here.

capacity.py   how many requests and tokens are served
settings.py   how the next token is chosen
forms.py      what form an answer has
requests.py   a request: prompt, settings, what it has so far
prefixes.py   what a page holds, as a digest of all tokens up to its end
pool.py       pages of the cache: free, in use, kept for their prefix
fairness.py   which tenant has had the least
schedule.py   which tokens the next step computes
"""
