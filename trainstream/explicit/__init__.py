"""The explicit face: `trainstream.wrap()` tells the pager and the planner what to do.

Nothing here moves a byte of its own: blocks are marked, and the pager moves what is marked.
"""
