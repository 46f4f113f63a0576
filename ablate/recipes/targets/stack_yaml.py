"""YAML files of training stacks, read as PyYAML reads them: `on` and `yes` are true, nothing is executed."""

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError


def load(text: str, where: str) -> dict[str, object]:
    """Return the content of a file.

    Args:
        text: the file.
        where: the option that names it, for errors.

    Raises:
        ValueError: it is no YAML, or no mapping.
    """
    loader = YAML(typ="safe", pure=True)
    loader.version = (1, 1)
    try:
        data = loader.load(text)
    except YAMLError as error:
        raise ValueError(f"{where}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: a mapping of sections is expected at its top")
    return data
