"""Paper tables: their files (`spec`), runs (`plan`, `execute`), the figures in their cells (`metrics`), their text."""
