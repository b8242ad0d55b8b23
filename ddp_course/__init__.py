"""Helpers for an interactive course on distributed training in PyTorch."""
