"""Basics for every part of the project: files, text, seeds, devices, tensors on disk; no Flower, no federation."""
