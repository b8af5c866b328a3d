"""For people at a command line or in a notebook: neither app imports anything of it, nor does an app bundle hold it."""

UNKNOWN_SHARE = 0.05  # of the site's own kind of inputs, that may be called unknown by default
