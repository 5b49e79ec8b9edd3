"""`python -m shardlib` is the command line."""

from shardlib.cli import main

main()
