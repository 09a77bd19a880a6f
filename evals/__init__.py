"""Evaluations and benches, on `razor_dist.llm`, servers, the planner and jobs.

- ``needle``, ``suites``, ``fidelity``, ``sources``: a job each, with its settings and report;
- ``grid``: many methods at the same documents, which also verifies head maps; ``maps``: head maps
  of several criteria at equal bytes;
- ``baselines``: kvpress's methods;
- ``methods``: what is compared, as data; ``settings``, ``texts``, ``report``: what others share;
- ``selection``: retrieval heads that choose blocks of keys, as a mask; ``watch``: where heads look;
- ``one_rank``: the one door to the engine; ``serving``: servers as a user starts them;
- ``bench``: speed and memory; ``demo``: ``razor-dist demo``.
"""
