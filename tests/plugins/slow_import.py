"""A plug-in whose import takes long."""

import time

time.sleep(5)
