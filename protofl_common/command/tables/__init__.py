"""Paper tables: their files (`model`), runs (`plan`, `execute`), `figures`, and how they are shown (`report`)."""
