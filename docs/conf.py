"""Builds the site with Sphinx: `make docs`. What is generated, `site_pages` writes before the pages are read."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "benchmarks")]

import moe_jax  # noqa: E402
from site_pages import setup as setup  # noqa: E402

project = "moe_jax"
author = "The authors of moe_jax"
copyright = "The authors of moe_jax, Apache-2.0"
release = version = moe_jax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "myst_nb",  # Markdown, and notebooks that are Markdown
]
exclude_patterns = ["_build", "site_pages"]

# Links to the documentation of others, where `-D links_to_others=1` says that the network is there: their inventories
# are fetched at build time, and a build without a network is to give the same warnings as one with it, none.
INVENTORIES = {
    "python": ("https://docs.python.org/3", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
    "optax": ("https://optax.readthedocs.io/en/latest", None),
}
if "links_to_others=1" in sys.argv:
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = INVENTORIES

# Of names of others nothing is asked: without a network they lead nowhere.
# And a type that is not public: nobody need name it.
nitpick_ignore_regex = [("py:.*", r"(?!moe_jax\.).*|moe_jax\.peft\.spec\.FormOfAdapter")]
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

autoclass_content = "both"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 4  # as GitHub names them
nb_execution_mode = "force"
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "moe_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
