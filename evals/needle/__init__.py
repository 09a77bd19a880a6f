"""The needle test: is a sentence found, wherever it stands in however long a document?

`config` holds its settings, `presets` what is hidden, asked and scored, `documents` the prompts,
`task` runs them as a job (`razor_dist.jobs`), `results` and `report` tell what came of it, with
the pictures of `heatmaps`.
"""
