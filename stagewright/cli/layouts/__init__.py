"""Commands on layouts of the training of transformers."""
