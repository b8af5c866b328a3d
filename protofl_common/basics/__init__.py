"""Basics for every part of the project: files, text, seeds, devices, tensors on disk.

They know of no Flower, and of no federation.
"""
