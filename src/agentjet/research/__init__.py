"""The automated researcher: a study is fixed before its data, measured by code, and judged by pre-declared rules.

Modules are imported by name (`agentjet.research.models`): the statistics need the extra `research`, the rest does not.
"""
