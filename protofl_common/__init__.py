"""Code that server and clients share: settings, wire, mathematics, models, data and metrics."""
