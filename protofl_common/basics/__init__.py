"""What every part of the project uses: files, text, seeds, devices, tensors on disk; no Flower, no federation."""
