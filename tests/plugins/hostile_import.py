"""A plug-in whose import ends the program."""

import sys

sys.exit("the import ends the program")
