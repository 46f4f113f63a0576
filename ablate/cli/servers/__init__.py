"""Servers that `ablate ui` starts: MLflow and the reports."""
