"""Settings of the site; `build.py` lays out what it is built from."""

import shardlib

project = "shardlib"
author = "the authors of shardlib"
copyright = "2026, the authors of shardlib"
release = shardlib.__version__

extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "sphinx_book_theme"
html_title = "shardlib"
html_logo = html_favicon = "static/logo.svg"
html_static_path = ["static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_theme_options = {
    "show_toc_level": 2,
    "use_fullscreen_button": False,
    "repository_url": "https://github.com/shardlib/shardlib",
    "repository_branch": "main",
    "use_edit_page_button": True,
    "use_repository_button": True,
}
# What a link to the site shows elsewhere.
html_baseurl = "https://shardlib.github.io/shardlib/"
ABOUT = (
    "Name the dimensions of a JAX model once: the best way to shard it, why, and a program of it."
)
CARD = f"""<meta property="og:title" content="shardlib">
<meta property="og:description" content="{ABOUT}">
<meta property="og:image" content="{html_baseurl}_static/card.png">
<meta name="description" content="{ABOUT}">
<meta name="twitter:card" content="summary_large_image">"""

# Notebooks are shown as they are stored; `--execute` runs them.
nb_execution_mode = "off"
nb_execution_timeout = 600
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# `single` and `double` backticks both mean code in docstrings.
default_role = "code"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_use_rtype = False
# A page of the reference is of public names; what they inherit from is not.
autodoc_default_options = {"members": True, "show-inheritance": False}

#: What begins a section of a docstring, after which indentation has another meaning.
SECTIONS = ("Args:", "Attributes:", "Returns:", "Yields:", "Raises:")


def mark_code(app, what, name, obj, options, lines):
    """Marks the indented examples of docstrings as code, as reStructuredText wants them."""
    marked, indented = [], False
    for number, line in enumerate(lines):
        if line in SECTIONS:
            marked += lines[number:]
            break
        code = line.startswith("    ") and not (indented or (marked and marked[-1].strip()))
        if code:
            marked += [".. code-block:: python", ""]
        indented = line.startswith("    ") or (indented and not line.strip())
        marked.append(line)
    lines[:] = marked


def add_card(app, pagename, templatename, context, doctree):
    """Adds to a page what other sites show of it."""
    context["metatags"] = context.get("metatags", "") + CARD


def setup(app):
    app.connect("html-page-context", add_card)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon's
