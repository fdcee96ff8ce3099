"""`python -m mooncake.cli_client`."""

import sys

from mooncake.cli_client import main

sys.exit(main())
