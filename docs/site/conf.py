"""Sphinx settings of the documentation site: see `gather.py`."""

from agentjet import __version__

project = "AgentJet"
version = release = __version__
project_copyright = "the authors of AgentJet"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 6
"""Headings get the anchors that GitHub gives them."""
default_role = "code"
"""Docstrings have Markdown's code spans."""
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
html_theme = "furo"
html_title = "AgentJet"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
