"""The figures of the page: each function takes the run and yields its figures."""
