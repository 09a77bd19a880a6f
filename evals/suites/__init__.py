"""Suites of questions about long texts, all as one job: what each method answers, beside full.

- ``sample``: a document with its questions, made to fit a length; ``tasks``: tasks, suites, scores;
- ``ruler``, ``qa``: RULER; ``shared``, ``nonliteral``, ``graph``, ``world``, ``nth``: ours;
- ``published``: other sets in their own files; ``config``: settings; ``job``, ``report``: runs.
"""
