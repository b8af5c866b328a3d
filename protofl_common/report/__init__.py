"""``report.html``: `reading.py` reads the run's folder, `charts.py` draws, `page.py` puts together, with all inside."""
