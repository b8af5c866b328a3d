"""Images made by programs, to train the embedded backbones on: unlike the tasks (no digits, no photographs)."""
