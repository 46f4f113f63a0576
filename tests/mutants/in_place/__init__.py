"""Folder for the PYTHONPATH of commands under test."""
