"""Reports of measurements: JSON, a table, figures and one self-contained HTML page.

Knows nothing of training: everything here is made from a ``Report``, which is plain numbers and text and comes back
from its JSON file unchanged. Standard library only; matplotlib is imported when a figure is drawn.

Example:
    >>> from choros.tools.demo.report import Report, Result, Run, Setting
    >>> setting = Setting(dataset="digits", train_rows=1257, test_rows=540, features=64, classes=("0", "1"))
    >>> report = Report(setting, (Result("Single", None, runs=(Run(seed=0, f1=0.97, seconds=2.0),)),))
    >>> report.best, report.fastest
    ('Single', 'Single')
"""

from choros.tools.demo.report.html_page import render, write
from choros.tools.demo.report.results import Report, Result, Run, Setting, load, save
from choros.tools.demo.report.table import text_table

__all__ = ["Report", "Result", "Run", "Setting", "load", "render", "save", "text_table", "write"]
