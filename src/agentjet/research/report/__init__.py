"""The report of a study: a page of HTML, the same in Markdown, figures; every number in it is a fact of the book.

    book ─► proceedings ─► facts ─► prose ─► Markdown, HTML        prose: every number is a reference, and is linted
                └────────► plots ─► SVG ───┘

matplotlib is imported when a report is built.
"""

from agentjet.research.report.document import book_of, build, build_all, check, facts_of, narrate

__all__ = ["book_of", "build", "build_all", "check", "facts_of", "narrate"]
