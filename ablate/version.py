"""Version of the package, in a file that any module imports without the public interface."""

__version__ = "0.1.0"
