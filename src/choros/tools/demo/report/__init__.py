"""Reports of measurements: JSON, a table, figures and one self-contained HTML page.

The package is independent of training. Its input is a ``Report`` of numbers and text, which a JSON file stores without
loss. It needs only the standard library; matplotlib is imported when a figure is drawn.

Example:
    >>> from choros.tools.demo.report import Report, Result, Run, Setting, findings
    >>> setting = Setting(dataset="digits", train_rows=1257, test_rows=540, features=64, classes=("0", "1"))
    >>> report = Report(setting, (Result("Single", None, runs=(Run(seed=0, accuracy=0.97, seconds=2.0),)),))
    >>> findings(report)
    ['Single reached an accuracy of 0.970; there is nothing to compare it with.']
"""

from choros.tools.demo.report.findings import findings
from choros.tools.demo.report.html_page import render, write
from choros.tools.demo.report.results import Report, Result, Run, Setting, load, save
from choros.tools.demo.report.table import text_table

__all__ = ["Report", "Result", "Run", "Setting", "findings", "load", "render", "save", "text_table", "write"]
