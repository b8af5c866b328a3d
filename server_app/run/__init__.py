"""What a run shows, keeps and leaves behind."""
