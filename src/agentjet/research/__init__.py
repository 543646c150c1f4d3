"""The automated researcher. A study is fixed before its data, measured by code and judged by declared rules.

Import its modules by name (`agentjet.research.models`). The statistics and the report need the extra `research`.
"""
