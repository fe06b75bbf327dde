"""Tests of mcinfer/mslite/_configuration.py: sections of entries, from files and dictionaries."""

from pathlib import Path

import pytest

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._configuration import load_sections, override


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.ini"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        (
            "[a]\n key  =  some value \n[b]\nkey=1\n",
            {"a": {"key": "some value"}, "b": {"key": "1"}},
        ),
        ("[a]\nkey=\"some value\"\nother=' x '\n", {"a": {"key": "some value", "other": " x "}}),
        ("# of it all\n[a]\n# of one\nkey=value # of a line\n", {"a": {"key": "value"}}),
        ("[a]\nKey=Value\nkey=value\n", {"a": {"Key": "Value", "key": "value"}}),
        ("[a]\nkey=1\n[a]\nkey=2\nmore=3\n", {"a": {"key": "2", "more": "3"}}),
        ("[a]\nkey=50%(x)s\n", {"a": {"key": "50%(x)s"}}),
        ("[a]\npath=/ä/b=c\n", {"a": {"path": "/ä/b=c"}}),
    ],
)
def test_file_is_read_as_sections(tmp_path: Path, text: str, sections: Sections) -> None:
    assert load_sections(written(tmp_path, text)) == sections


@pytest.mark.parametrize("content", [b"key=value\n", b"[a]\nno value\n", b"[a]\nkey=\xff\n"])
def test_file_that_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.ini"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"^config_path: {path} does not load: "):
        load_sections(str(path))


def test_dictionary_overrides_the_file_entry_by_entry(tmp_path: Path) -> None:
    path = written(tmp_path, "[a]\nkey=file\nkept=file\n")
    more = {"a": {"key": " 'given' "}, "b": {"key": "x"}}
    assert override(load_sections(path), more) == {
        "a": {"key": "given", "kept": "file"},
        "b": {"key": "x"},
    }
    assert more == {"a": {"key": " 'given' "}, "b": {"key": "x"}}
