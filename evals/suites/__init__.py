"""Suites of questions about long texts, all as one job: what each method answers, beside full.

- ``sample``: a document with its questions, made to fit a length; ``tasks``: tasks, suites, scores;
- ``ruler``, ``qa``: RULER; ``shared``, ``nonliteral``, ``graph``, ``world``, ``nth``: ours;
- ``registry``: suites by name; ``config``: their settings; ``job``, ``report``: the run, its page.
"""
