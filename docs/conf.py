"""Sphinx configuration. ``make docs`` builds with warnings as errors."""

import collections
import importlib.util
import os
from pathlib import Path
import shutil

from sphinx.errors import ExtensionError

import numpyro_repulsion

project = "numpyro-repulsion"
author = copyright = "the numpyro-repulsion developers"
release = version = numpyro_repulsion.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
# Notebooks show their figures whatever backend the shell chose.
os.environ.pop("MPLBACKEND", None)
# docs/execute.py has run the notebooks, several at a time; one that it has not run is run here.
nb_execution_mode = "cache"
nb_execution_cache_path = os.path.join(os.path.dirname(__file__), "_build", ".jupyter_cache")
nb_execution_timeout = 600
# Pages of these show the outputs that their notebooks store.
nb_execution_excludepatterns = [f"{name}.ipynb" for name in os.environ.get("STORED_NOTEBOOKS", "").split()]
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "none"
# Signatures show defaults as the source has them.
autodoc_preserve_defaults = True
autosummary_generate = False
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(jax|numpyro|collections|Exception|ValueError|TypeError)(\..*)?"),
    ("py:obj", r".*\.(T|State)"),
    # Bases that only share code.
    ("py:class", r"numpyro_repulsion\..*\.(_\w+|Settings|Momenta|Wrapping)"),
]

html_theme = "furo"
html_title = "numpyro-repulsion"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
# The default for dark mode underlines modules, as if they were links.
pygments_dark_style = "a11y-dark"
# MathJax in one file, from the package that ships it, so formulas need no network. Without the package, its CDN.
MATHJAX = "tex-svg.js"
mathjax3_config = {"svg": {"scale": 0.9}}  # capitals as high as those of the text
mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
if mathjax:
    mathjax_path = MATHJAX


def require_public_names(app, env):
    """Fails the build where a public name is not documented."""
    documented = env.domains.python_domain.objects
    names = [f"numpyro_repulsion.{name}" for name in numpyro_repulsion.__all__]
    if missing := [name for name in names if name not in documented]:
        raise ExtensionError(f"Public names that docs/api does not document: {', '.join(missing)}.")


def copy_notebooks(app):
    """Sphinx reads only below this folder and resolves links, so the notebooks of the top level are copied here."""
    shutil.rmtree(app.srcdir / "notebooks", ignore_errors=True)
    shutil.copytree(app.srcdir.parent / "notebooks", app.srcdir / "notebooks")


def follow_copies(app, docname, source):
    """Links between pages and notebooks are written for the repository; here they lead to the copies, and from them.

    A number and its error stay on one line.
    """
    for here, there in (("](../notebooks/", "](notebooks/"), ("](../docs/", "](../"), (" ± ", "\u00a0±\u00a0")):
        source[0] = source[0].replace(here, there)


def copy_mathjax(app, error):
    if mathjax and not error and app.builder.format == "html":
        source = Path(mathjax.origin).parent / "static" / "mathjax" / MATHJAX
        shutil.copy(source, Path(app.outdir) / "_static" / MATHJAX)


def skip_fields(app, what, name, obj, skip, options):
    """The docstrings of named tuples describe their fields; "Alias for field number 0" adds nothing."""
    return True if isinstance(obj, collections._tuplegetter) else None


def setup(app):
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("build-finished", copy_mathjax)
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", follow_copies)
    app.connect("env-check-consistency", require_public_names)
