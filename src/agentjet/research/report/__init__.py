"""The report of a study: an HTML page, the same in Markdown, and figures. Every number in it is a fact of the journal.

    log ─► StudyView ─► facts ─► prose ─► Markdown, HTML        prose: every number is a reference, and is linted
                └─────► figures ─► SVG ───┘

matplotlib is imported when a report is built.
"""

from agentjet.research.report.document import build, build_all, check, facts_of, log_of, narrate

__all__ = ["log_of", "build", "build_all", "check", "facts_of", "narrate"]
