"""Conversations and batches as trees of tokens. Python and NumPy only.

`tree` keeps the exact tokens of the calls of one episode and role, and finds the calls that are not trained. `forest`
merges the calls of a batch, so that every distinct token-in-context exists once, and encodes support sets.
"""

from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from agentjet.timeline.tree import ConversationTree, Match

__all__ = ["ConversationTree", "Facts", "Forest", "Match", "Row", "TrainingBatch", "build_forest", "call_row"]
