"""What is not collected: examples in files that import a library which is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["src/choros/spark/*"]
