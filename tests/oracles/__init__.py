"""Independent answers to compare with: other people's code, loaded as installed, never copied."""
