"""Documents of many formats as texts, cut where they are too long.

`collect` finds the documents that a command line names, `read` makes texts of their files by the
readers beside it, in processes with bounds, and `split` cuts a text at chapters or paragraphs.
Headings are lines that begin with ``#``, in whatever format they were; blocks of text are separated
by an empty line.
"""
