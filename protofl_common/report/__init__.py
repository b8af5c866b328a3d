"""The page that a run leaves behind: ``report.html``, one file with everything in it.

`reading.py` reads the run's folder, a module of `figures/` draws each figure, `page.py` puts them together. Nothing
here is needed by a run: the server writes the page when all else is done, ``protofl report RUN`` at any time. Importing
`page` takes seconds, of matplotlib and scikit-learn.
"""
