"""`python -m ray_pools.cli`, for who has no console script on the path."""

import os
import sys

# -m puts the working directory first, where a user's own modules may have the names of those that we load
if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from ray_pools.cli import main

if __name__ == "__main__":
    main()
