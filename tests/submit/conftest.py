import pytest


@pytest.fixture(autouse=True)
def config(tmp_path_factory, monkeypatch):
    """The folder of a user's settings; that of the tester is not read."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder / "choros"


@pytest.fixture
def script_folder(tmp_path, monkeypatch):
    """Return an empty directory with a script, as the current one; the processor's flags are not noted in jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHOROS_SUBMIT_CPU", "")
    (tmp_path / "train.py").touch()
    return tmp_path
