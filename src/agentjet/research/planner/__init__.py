"""The planner makes a study from a topic or a file, with packaged knowledge of the settings. A language model may add
to it.

Each proposal is checked against the schema of actions, then against the rules in `agentjet.research.amendments`.
"""
