"""One module for each revision, in their order; what is released is not changed any more."""
