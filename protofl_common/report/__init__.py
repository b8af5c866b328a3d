"""``report.html``: `reading` reads the run's folder, `charts` draws, `page` puts all together."""
