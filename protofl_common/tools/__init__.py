"""For people at a command line or in a notebook.

Neither app imports anything of it, and no app bundle has it.
"""

UNKNOWN_SHARE = 0.05  # of the site's own kind of inputs, that may be called unknown by default
