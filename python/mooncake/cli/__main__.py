"""`python -m mooncake.cli`."""

import sys

from mooncake.cli import main

sys.exit(main())
