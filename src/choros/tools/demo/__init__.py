"""The comparison of ``choros demo``: one network, one data set, plain ``fit`` and several algorithms.

``plan`` defines the comparison and prepares the process. ``network`` has the models. ``baseline`` runs ``plain_fit`` in
a process without Choros. ``comparison`` trains by the algorithms and scores all. ``measurement`` takes start-up out of
the times and reads timelines. ``progress`` shows the progress. ``choros.tools.demo.report`` writes the report.
"""
