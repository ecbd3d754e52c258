"""``choros doctor``: facts, measurements and a small training on every rank of a job, with advice on problems.

``facts.py`` collects facts. ``measurements.py``, ``link_bandwidth.py`` and ``smoke_processes.py`` measure and try.
``findings.py`` and ``rules/`` derive problems from the results. ``report.py`` writes the report. ``rank_check.py`` runs
all steps on one rank, and ``launch_checks.py`` starts the ranks.
"""
