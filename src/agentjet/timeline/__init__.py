"""Conversations and batches as trees of tokens. Python and NumPy only.

`tree` holds one episode's calls and keeps their exact tokens; `identity` says when messages are the same by meaning;
`forks` says why trees branch and which answers nobody heard; `forest` merges a batch's calls so that every distinct
token-in-context is there once.
"""

from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from agentjet.timeline.tree import ConversationTree, Match

__all__ = ["ConversationTree", "Facts", "Forest", "Match", "Row", "TrainingBatch", "build_forest", "call_row"]
