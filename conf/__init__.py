"""Hydra configuration: data only. One file a word, one folder a group."""
