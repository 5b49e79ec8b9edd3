"""Settings of the site; `build.py` lays out what it is built from."""

import re

from docutils import nodes
from sphinx import addnodes

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
# Blocks without a language are what a shell or a program prints.
highlight_language = "text"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
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


#: Pages whose text has no links to the glossary: itself, and lists of what others say.
UNLINKED = ("docs/glossary", "CHANGELOG", "index", "gallery")
#: Words of the glossary that everybody knows: the first on each page is not linked.
EVERYDAY = ("plan", "host", "device", "process", "dim", "verified", "finding", "embedding and head")
#: Where words are not prose.
QUIET = (
    *(nodes.reference, nodes.title, nodes.strong, nodes.literal, nodes.literal_block),
    *(nodes.raw, nodes.math, addnodes.desc_signature),
)


def terms(doctree):
    """The words of the glossary, each with its anchor, which the page gets."""
    anchors = {}
    for strong in doctree.findall(nodes.strong):
        words = strong.astext()
        if not words.endswith(".") or strong.next_node(nodes.literal, descend=True):
            continue
        anchor = "term-" + nodes.make_id(words)
        strong["ids"] = [anchor]
        for word in re.split(r", (?!\d)|[()]", words.rstrip(".*")):
            word = word.strip(" *").split(" 1,")[0]
            if word and word.lower() not in EVERYDAY:
                anchors[word if word.isupper() else word.lower()] = anchor
    return anchors


def link_terms(app, doctree, docname):
    """Links the first use of each word of the glossary on a page."""
    if docname in UNLINKED:
        return
    anchors = dict(app.env.glossary_terms)
    where = app.builder.get_relative_uri(docname, "docs/glossary")
    for text in list(doctree.findall(nodes.Text)):
        parent, above = text.parent, text.parent
        while (
            above is not None and not isinstance(above, QUIET) and above.tagname != "desc_signature"
        ):
            above = above.parent
        if above is None and anchors:
            parent.replace(text, linked(str(text), anchors, where))


def linked(text, anchors, where):
    """A text as nodes; words that are linked leave `anchors`."""
    parts, start = [], 0
    words = "|".join(re.escape(word) for word in sorted(anchors, key=len, reverse=True))
    for match in re.finditer(rf"(?<![\w·=-])(?:{words})s?(?![\w·=-])", text, re.IGNORECASE):
        word = match.group()
        keys = (word, word[:-1], word.lower(), word.lower()[:-1])
        key = next((key for key in keys if key in anchors), None)
        if key is None:
            continue
        anchor = anchors.pop(key)
        parts.append(nodes.Text(text[start : match.start()]))
        link = nodes.reference(
            "", word, refuri=f"{where}#{anchor}", classes=["term"], internal=True
        )
        parts.append(link)
        start = match.end()
    return [*parts, nodes.Text(text[start:])]


def name_columns(app, doctree, docname):
    """Gives columns without a heading one that is heard and not seen."""
    for entry in [e for head in doctree.findall(nodes.thead) for e in head.findall(nodes.entry)]:
        if not entry.astext().strip():
            words = nodes.inline("", "of", classes=["visually-hidden"])
            entry.children = []
            entry += nodes.paragraph("", "", words)


def read_glossary(app, doctree):
    """Remembers the words of the glossary, as soon as it is read."""
    if app.env.docname == "docs/glossary":
        app.env.glossary_terms = terms(doctree)


def setup(app):
    app.connect("doctree-read", read_glossary)
    app.connect("doctree-resolved", link_terms)
    app.connect("doctree-resolved", name_columns)
    app.connect("html-page-context", add_card)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon's
