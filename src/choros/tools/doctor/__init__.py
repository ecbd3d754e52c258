"""``choros doctor``: what every rank of a job finds out, measures and tries; and in words what to change.

``facts.py`` looks, ``measures.py`` and ``smoke.py`` try, ``findings.py`` and ``rules/`` judge and touch nothing,
``report.py`` writes, ``visit.py`` puts it together on a rank and ``ward.py`` starts the ranks.
"""
