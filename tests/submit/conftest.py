import pytest


@pytest.fixture
def script_folder(tmp_path, monkeypatch):
    """Return an empty directory with a script, as the current one; the processor's flags are not noted in jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHOROS_SUBMIT_CPU", "")
    (tmp_path / "train.py").touch()
    return tmp_path
