"""Other ways to keep fewer keys and values, by the library kvpress, beside ours.

`presses` lists them by their names in our evaluations, with their settings; `model` runs one on
transformers' own model, in a process of its own, and says how much it may keep; `client` starts
that process and has the methods of `razor_dist.LLM` that a job's items call.
"""
