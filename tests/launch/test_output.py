import contextlib
import io
import re

import pytest

from choros.errors import InvalidInputError
from choros.launch.process.rank_output import Output


def test_lines_are_shown_and_kept(tmp_path, capsys):
    output = Output(11, str(tmp_path / "new" / "logs"))
    for rank, kind, text in ((0, "out", "one"), (10, "err", "wörds"), (0, "out", "two"), (3, "err", "")):
        output.write_line(rank, kind, text)
    output.say("choros run: a word")
    output.close()
    output.close()
    folder = tmp_path / "new" / "logs"
    assert sorted(path.name for path in folder.iterdir()) == [f"rank.{rank:02}" for rank in range(11)]
    assert (folder / "rank.00" / "stdout").read_text() == "one\ntwo\n"
    assert (folder / "rank.10" / "stderr").read_text(encoding="utf-8") == "wörds\n"
    assert (folder / "rank.03" / "stderr").read_text() == "\n"
    assert (folder / "rank.10" / "stdout").read_text() == ""
    captured = capsys.readouterr()
    assert captured.out == "[0] one\n[0] two\n"
    assert captured.err == "[10] wörds\n[3] \nchoros run: a word\n"
    Output(1, str(folder)).close()  # one rank needs one digit; what an earlier run left is not touched
    assert (folder / "rank.0" / "stdout").read_text() == ""
    assert (folder / "rank.00" / "stdout").read_text() == "one\ntwo\n"


def test_times(tmp_path, capsys):
    output = Output(1, str(tmp_path), timestamps=True)
    output.write_line(0, "out", "hello")
    output.close()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(f"{time} \\[0\\] hello\n", capsys.readouterr().out)
    assert re.fullmatch(f"{time} hello\n", (tmp_path / "rank.0" / "stdout").read_text())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"cannot be kept in .*file"):
        Output(2, str(tmp_path / "file"))


def test_a_file_that_cannot_be_written_ends_the_keeping_only(tmp_path, capsys):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    output = Output(1, str(tmp_path))
    output.write_line(0, "out", "one")
    output.write_line(0, "out", "two")
    output.write_line(0, "err", "three")
    output.close()
    captured = capsys.readouterr()
    assert captured.out == "[0] one\n[0] two\n"
    assert captured.err.count("what rank 0 prints is no longer kept") == 1
    assert (tmp_path / "rank.0" / "stderr").read_text() == "three\n"


def test_where_it_is_shown():
    output, broken = Output(1), []
    output.on_broken = lambda: broken.append(True)
    cell = io.StringIO()  # as a notebook's: without a buffer
    with contextlib.redirect_stdout(cell):
        output.write_line(0, "out", "hello")
        assert cell.getvalue() == "[0] hello\n"
        cell.close()
        assert broken == []
        output.write_line(0, "out", "nobody reads this")
        assert broken == [True]
    with contextlib.redirect_stdout(None):
        output.write_line(0, "out", "a process without output")
    output.close()
