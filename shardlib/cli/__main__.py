"""Runs the command line: `python -m shardlib.cli`."""

from shardlib.cli import main

if __name__ == "__main__":
    main()
