"""``report.html``: `reading.py` reads the run's folder, `figures/` draw, `page.py` puts together, with all inside."""
