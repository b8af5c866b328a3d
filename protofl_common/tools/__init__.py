"""For people at a command line or in a notebook: neither app imports anything of it, nor does an app bundle hold it."""
