"""Conversations and batches as trees of tokens. Python and NumPy only.

`tree` holds one episode's calls and keeps their exact tokens; `identity` says when messages are the same by meaning;
`forks` says why trees branch and which answers nobody heard; `forest` merges a batch's calls so that every distinct
token-in-context is there once.
"""

from agentjet.timeline.forest import Forest, Row, build_forest
from agentjet.timeline.tree import ConversationTree, Match

__all__ = ["ConversationTree", "Forest", "Match", "Row", "build_forest"]
