"""A run on disk: its folder, its figures, and how several runs compare."""
