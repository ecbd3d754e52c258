"""The comparison behind ``choros demo``: one network, one data set, every algorithm.

``plan`` says what is compared and prepares the process, ``network`` is the model, ``running`` trains and scores it,
``display`` shows how far it is. The report is made by ``choros.tools.demo.report``.
"""
