"""One module for each revision, in their order; what is released is not changed any more.

A revision adds tables, and columns that may be empty or have a default of the server's: servers of
the version before work on while it is made, and after.
"""
