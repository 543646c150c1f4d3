"""The process of a rank. The garbage collector would take a fifth of the start, so it is off during the import."""

import gc

gc.disable()

from agentjet.compute.rank import main  # noqa: E402

gc.freeze()
gc.enable()
main()
