"""Paper tables: their files (`spec`), runs (`plan`), the figures in their cells (`figure`), their text."""
