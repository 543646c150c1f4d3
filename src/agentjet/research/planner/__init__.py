"""The planner: from a topic to a study, by packaged knowledge of the settings; a language model may add to it.

Whatever is proposed, by a person or by a model, passes through `actions` and `course`: a schema, then the rules.
"""
