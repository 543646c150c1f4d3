"""The report of a study: one facts object, and one template for its Markdown and its HTML.

log ─► StudyView ─► facts ─► report.md ─► report.html      the same facts are the page's, and facts.json
                      └────► figures (SVG)
"""

from agentjet.research.report.document import build, check, plan_page

__all__ = ["build", "check", "plan_page"]
