"""Commands that a test starts import the mutant, too: this folder is on their PYTHONPATH."""

import changed_import

changed_import.install()
