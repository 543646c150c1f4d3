"""`python -m agentjet.compute.embedded`: the worker process.

What its libraries make stays as long as it lives: the garbage collector looks for litter among it neither while it is
made, which would be a fifth of the start, nor later, between two tokens.
"""

import gc

gc.disable()

from agentjet.compute.embedded.worker import main  # noqa: E402

gc.freeze()
gc.enable()
main()
