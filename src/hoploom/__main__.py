"""`python -m hoploom` is `hoploom`: for launchers that start modules, such as `torchrun -m hoploom train run.toml`."""

import sys

from hoploom.cli import main

if __name__ == "__main__":
    sys.exit(main())
