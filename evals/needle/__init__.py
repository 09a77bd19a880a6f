"""The needle test: is a sentence found, wherever it stands in however long a document?

- ``config``, ``presets``: settings; the facts that are hidden, asked for and scored;
- ``documents``: texts with hidden sentences, prompts as token ids;
- ``task``: the test as a job (`razor_dist.jobs`);
- ``grid``, ``replay``: the job that tries many settings of one model, sharing prefills; with it
  ``identify --verify`` and ``studies`` (``eval heads``, ``eval ablations``);
- ``results``, ``report``: scores, tables and pictures of all of these;
- ``model``: the needle model and its tokenizer.
"""
