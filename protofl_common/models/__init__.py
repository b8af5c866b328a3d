"""Client models: a body x -> z in R^D and a head z -> logits.

`build` makes them by the name of an architecture, as `config/architectures.py` lists them.
"""
