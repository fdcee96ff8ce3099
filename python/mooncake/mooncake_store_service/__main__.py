"""`python -m mooncake.mooncake_store_service`."""

import sys

from mooncake.mooncake_store_service import sync_main

sys.exit(sync_main())
