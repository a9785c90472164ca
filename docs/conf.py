"""Configuration of the documentation site; `./docs.sh` builds it."""

import hashlib
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
LIBRARY = HERE.parent / "strata_jax"
sys.path.insert(0, str(HERE / "_extensions"))
# The notebooks' kernels inherit these.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE / "_build" / "compiled"))

import strata_jax  # noqa: E402

project = "strata_jax"
author = "The strata_jax developers"
copyright = author
version = release = strata_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "experiment_results",
    "mathml",
    "notebook_pages",
    "public_names",
]
exclude_patterns = ["_build", "_extensions"]

# Text
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "

# API reference
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autosummary_generate = False
maximum_signature_line_length = 70
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
doctest_global_setup = """
import jax
import jax.numpy as jnp
import numpy as np
import strata_jax as strata
from strata_jax.experts import *
from strata_jax.measures import *
from strata_jax.sampling import *
from strata_jax.testing import *
"""


# Notebooks run with the build. What they print is kept for as long as neither they nor
# the library changes.
def _library_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(LIBRARY.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks" / _library_hash())
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 900
nb_merge_streams = True
nb_output_stderr = "remove"

# Pages. Nothing is asked of any other host: no web fonts, no scripts from elsewhere.
html_theme = "sphinx_book_theme"
html_title = "strata_jax"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    # The bar above all pages would only repeat the search of the side bar.
    **{f"navbar_{place}": [] for place in ("start", "center", "end", "persistent")},
}
