"""First wrong stage of a cast or a product, measured given what the subject's stage before gave."""
