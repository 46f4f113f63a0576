"""Stages of a cast and of a product, each measured given what the subject's stage before gave."""
