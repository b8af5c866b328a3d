"""What a run may be: its settings, the catalog of algorithms, packages of others, what an operator permits."""
