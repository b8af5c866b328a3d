"""Names and types of the settings; this folder imports nothing else of the project."""
