"""Other ways to keep fewer keys and values, by the library kvpress, beside ours.

`presses` lists them by their names in our evaluations, with their settings; `model` runs one on
transformers' own model, and says how much it may keep.
"""
