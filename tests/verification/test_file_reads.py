"""Contexts that collect the files which user code opens."""

from ablate.verification.file_reads import opened


def test_a_context_inside_another_ends_alone(tmp_path):
    """Both sets are empty, so equal, when the inner context ends."""
    path = tmp_path / "settings.json"
    path.write_text("{}")
    with opened() as outer:
        with opened() as inner:
            pass
        path.read_text()
    assert str(path) in outer
    assert not inner
