"""For people at a command line or in a notebook: neither app imports anything of it, nor does an app bundle hold it."""

UNKNOWN_SHARE = 0.05
"""Of images of the site's own kind, that may be called unknown unless the user chooses another share."""
