"""Each algorithm through the whole system against an independent script of plain PyTorch loops."""
