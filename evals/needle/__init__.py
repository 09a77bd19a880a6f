"""The needle test: is a sentence found, wherever it stands in however long a document?

- ``config``, ``presets``: settings; the facts that are hidden, asked for and scored;
- ``documents``: documents with hidden sentences, and their questions;
- ``task``: the test as a job (`razor_dist.jobs`);
- ``results``, ``report``: scores, tables and pictures of all of these;
- ``model``: the needle model and its tokenizer.
"""
