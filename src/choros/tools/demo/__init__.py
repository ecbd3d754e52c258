"""The comparison of ``choros demo``: one network, one data set, every algorithm.

``plan`` defines the comparison and prepares the process. ``network`` has the model. ``comparison`` trains and scores
it. ``progress`` shows the progress. ``choros.tools.demo.report`` writes the report.
"""
