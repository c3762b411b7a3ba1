"""`python -m trainstream`: the same as the command `trainstream`."""

import sys

from trainstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
