"""`python -m shardlib` is the command line."""

import sys

try:
    from shardlib.cli import main

    main()
except KeyboardInterrupt:  # while modules were loaded
    sys.exit(130)
