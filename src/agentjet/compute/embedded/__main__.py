"""`python -m agentjet.compute.embedded`: the worker process.

Objects of the imported libraries live as long as the process. The garbage collector is off during the import, where it
would take a fifth of the start, and skips these objects afterwards.
"""

import gc

gc.disable()

from agentjet.compute.embedded.worker import main  # noqa: E402

gc.freeze()
gc.enable()
main()
