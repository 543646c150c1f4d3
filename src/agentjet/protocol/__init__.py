"""Bodies of the control API, and the rules that client and server share.

`base` has what all bodies share, each other module the bodies of some routes. Import the names from this package. Times
are Unix seconds, durations are seconds.
"""

# The modules define bodies and little else: a list of their hundred names would repeat them.
from agentjet.protocol.base import *  # noqa: F403
from agentjet.protocol.control import *  # noqa: F403
from agentjet.protocol.records import *  # noqa: F403
