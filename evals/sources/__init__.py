"""Do an answer's sources, and a server's citations, hold what the answer says?"""
